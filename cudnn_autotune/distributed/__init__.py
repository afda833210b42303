"""Tuning by the ranks of torch.distributed: a model together, or agreement on separate results."""

from cudnn_autotune.distributed.agreement import agree
from cudnn_autotune.distributed.model import tune
from cudnn_autotune.distributed.outcome import DistributedTuningError
from cudnn_autotune.models.problems import problems_of

__all__ = ["DistributedTuningError", "agree", "problems_of", "tune"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
