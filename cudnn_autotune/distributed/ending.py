"""How a call of a group ends: one value in the store, and the first one written stands.

A rank that has seen everybody ready and a rank that has seen another die may speak at the same
moment. The store's compare-and-set lets one of them win, for all ranks alike: so no rank installs
what another one gave up. (Nobody can help it where the store itself dies at that very moment: who
has read the ending keeps to it, who has not gives up.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from cudnn_autotune.core.json_node import Node


@dataclass(frozen=True)
class Ending:
    """``reason`` is empty where all have agreed."""

    rank: int | None = None
    """The global rank to blame, if one is."""
    reason: str = ""

    @property
    def is_agreed(self) -> bool:
        return not self.reason

    def to_text(self) -> str:
        return json.dumps({"rank": self.rank, "reason": self.reason})

    @classmethod
    def from_text(cls, text: str) -> Ending:
        """Raises ValueError where it is none."""
        fields = Node(json.loads(text), "ending").fields("rank", "reason")
        rank = fields["rank"]
        return cls(None if rank.value is None else rank.integer(), fields["reason"].text())


AGREED = Ending()
