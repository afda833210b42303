"""The ways of ddp_norms: the computation of convolutions, then of norms."""

from __future__ import annotations

WRAPPERS = ("ddp", "ddp_compiled", "fsdp2", "pipeline")
"""``ddp_compiled``: what DistributedDataParallel returns is compiled; PyTorch splits its graph."""

PYTORCH, CHOSEN, TWO_PASSES = "PyTorch's", "chosen", "two passes"

WAYS = (
    "eager",
    *(f"{of}: {norms}" for of in ("enable", "convert") for norms in (PYTORCH, CHOSEN, TWO_PASSES)),
    "compile",
    *(f"backend: {norms}" for norms in (PYTORCH, CHOSEN)),
)


def parts(way: str) -> tuple[str, str]:
    """A way's convolutions, and its norms; PyTorch's where it names none."""
    of, _, norms = way.partition(": ")
    return of, norms or PYTORCH


def baseline(way: str) -> str | None:
    """The way with the same convolutions and PyTorch's norms; None for one that is such itself."""
    of, norms = parts(way)
    return None if norms == PYTORCH else f"{of}: {PYTORCH}"
