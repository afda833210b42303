"""The outcome that ends a call of a group: one value in the store, written only once.

One rank may see that all are ready while another sees a rank die. The store's compare-and-set lets
one of the two outcomes win for all ranks. So no rank installs decisions of a call that another one
gave up. (If the store itself dies just then, ranks that have read the outcome follow it, and the
others give up.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The end of a call. ``reason`` explains its failure; it is empty if all ranks have agreed."""

    rank: int | None = None
    """The global rank that caused the failure; None if no single rank did."""
    reason: str = ""

    @property
    def is_agreed(self) -> bool:
        return not self.reason

    def to_text(self) -> str:
        """Returns ASCII; :meth:`from_text` is its inverse."""
        return json.dumps([self.rank, self.reason])

    @classmethod
    def from_text(cls, text: str) -> Outcome:
        return cls(*json.loads(text))


AGREED = Outcome()


class DistributedTuningError(RuntimeError):
    """The error, on every rank of the group, of ranks that could not tune together or agree.

    No rank has installed anything, and each may go on untuned::

        try:
            cudnn_autotune.distributed.tune(model, images)
        except cudnn_autotune.distributed.DistributedTuningError as error:
            print(error.rank, error.reason)
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(rank, reason)  # the arguments that it is pickled with
        self.rank = rank
        """The global rank that caused the failure; None if no single rank did."""
        self.reason = reason
        """The failure in words."""

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        return f"{who}{self.reason} (this rank has installed nothing)"
