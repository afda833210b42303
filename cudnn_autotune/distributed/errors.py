"""The one error that every rank gets."""

from __future__ import annotations


class DistributedTuningError(RuntimeError):
    """Ranks could not tune together, or not agree: every rank of the group raises it."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(rank, reason)  # what it is pickled with: launchers pass errors on
        self.rank = rank
        """Whose fault it was: a global rank; None where no single rank is to blame."""
        self.reason = reason

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        return f"{who}{self.reason} (this rank has installed nothing)"
