"""Plans made before a call needs them. Their maker (``prefetching``) registers here the functions
that hand over and drop them."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem

Take = Callable[["_C.ConvProblem", str, int], "_C.Plan | None"]
"""(problem, candidate's text, device) -> the plan, handed over to the caller, or None."""

_rooms: list[tuple[Take, Callable[[], None]]] = []


def register(take: Take, clear: Callable[[], None]) -> None:
    """Adds a maker of plans.

    Args:
        take: hands over a plan.
        clear: drops all plans that wait.
    """
    _rooms.append((take, clear))


def taken(problem: ConvProblem, text: str, device: int) -> _C.Plan | None:
    """Hands over the plan of a candidate that was made ahead; None if there is none."""
    plans = (take(problem.native(), text, device) for take, _ in _rooms)
    return next((plan for plan in plans if plan is not None), None)


def clear() -> None:
    """Drops all plans that wait."""
    for _, clear_room in _rooms:
        clear_room()
