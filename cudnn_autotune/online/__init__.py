"""Choices that the caller's own calls decide: the mode ``online``, and trials of new sizes."""

from cudnn_autotune.core.late import imported

__all__ = ["preparing", "undecided"]


def undecided() -> int:
    """Returns the number of problems that calls are still deciding."""
    return int(imported("cudnn_autotune.online.tuner:TUNER").undecided)


def preparing() -> int:
    """Returns the number of problems whose calls still prepare candidates."""
    return int(imported("cudnn_autotune.online.tuner:TUNER").preparing)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
