"""The room that keeps decisions on disk, for many processes and machines."""

from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.store.layered import Layered
from cudnn_autotune.store.provenance import Provenance

__all__ = ["Decision", "Environment", "Layered", "Provenance", "Store"]
