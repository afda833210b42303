"""In what order a command lists decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from cudnn_autotune.store.decision import Decision

SORTS = ("problem", "time", "workspace")

sort_option = click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="problem",
    show_default=True,
    help="By problem, or the longest time or the largest workspace first.",
)


def in_order(decisions: Iterable[Decision], by: str) -> list[Decision]:
    """``by`` is one of ``SORTS``; those without a time come last."""
    orders: dict[str, Callable[[Decision], Any]] = {
        "problem": _by_problem,
        "time": lambda decision: (-_time_ms(decision), _by_problem(decision)),
        "workspace": lambda decision: (-_workspace(decision), _by_problem(decision)),
    }
    return sorted(decisions, key=orders[by])


def _by_problem(decision: Decision) -> tuple[Any, ...]:
    problem = decision.problem
    return (
        problem.spatial_dims,
        # From the first layers of a network to the last, by and large.
        tuple(-size for size in problem.input_shape[2:]),
        problem.input_shape,
        problem.weight_shape,
        decision.key,
        problem.deterministic,
    )


def _time_ms(decision: Decision) -> float:
    chosen = decision.chosen
    return 0.0 if chosen is None else chosen.reported_ms or 0.0


def _workspace(decision: Decision) -> int:
    return decision.chosen.candidate.workspace_bytes if decision.chosen else 0
