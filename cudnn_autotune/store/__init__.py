"""The room that keeps decisions on disk, for many processes and machines."""

from cudnn_autotune.store.decision import Decision, Policy, Provenance
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Layered, Store

__all__ = ["Decision", "Environment", "Layered", "Policy", "Provenance", "Store"]
