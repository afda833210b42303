"""The one error that every rank gets."""

from __future__ import annotations


class DistributedTuningError(RuntimeError):
    """Ranks could not tune together, or not agree: every rank of the group raises it."""

    rank: int | None
    """Whose fault it was: a global rank; None where no single rank is to blame."""
    reason: str

    def __init__(self, rank: int | None, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        who = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{who}{reason} (nothing of this call was installed on any rank)")
