"""What is compared: modes that serve at once, and races with and without neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One process, which picks for every layer."""

    mode: str
    """Empty: that which filled the store."""
    neighbours: bool = False
    """Whether it may look into the store."""
    budget_ms: float | None = None

    @property
    def name(self) -> str:
        if self.mode:
            return self.mode
        budget = "" if self.budget_ms is None else f"@{self.budget_ms:g}"
        return f"race{budget}" + ("+neighbours" if self.neighbours else "")


AT_ONCE = (Arm("heuristic"), Arm("neighbour", neighbours=True))
RACE = Arm("")


def arms(budgets_ms: Iterable[float]) -> list[Arm]:
    found = [*AT_ONCE, RACE, Arm("", neighbours=True)]
    for budget_ms in budgets_ms:
        found += [Arm("", n, budget_ms) for n in (False, True)]
    return found
