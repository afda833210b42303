"""How a call of a group ends: one value in the store, of which the first that is written stands.

One rank may see that all are ready while another sees a rank die. The store's compare-and-set lets
one of the two verdicts win for all ranks, so that no rank installs what another one gave up. (If
the store itself dies at that very moment, ranks that have read the verdict keep to it, and the
others give up.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """``reason`` says why the call failed; it is empty where all ranks have agreed."""

    rank: int | None = None
    """The global rank whose fault it was, if it was one rank's."""
    reason: str = ""

    @property
    def is_agreed(self) -> bool:
        return not self.reason

    def to_text(self) -> str:
        """ASCII; :meth:`from_text` is its inverse."""
        return json.dumps([self.rank, self.reason])

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        return cls(*json.loads(text))


AGREED = Verdict()


class DistributedTuningError(RuntimeError):
    """Ranks could not tune together, or not agree: every rank of the group raises it."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(rank, reason)  # the arguments that it is pickled with
        self.rank = rank
        """Whose fault it was: a global rank; None where no single rank is to blame."""
        self.reason = reason

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        return f"{who}{self.reason} (this rank has installed nothing)"
