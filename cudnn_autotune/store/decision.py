"""A decision for one problem: the chosen candidate and all others that were measured with it.

Candidates are named by their engine and knobs, never by their index in cuDNN's list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.json_node import MOST, Node, shown
from cudnn_autotune.engines.configs import Candidate, check_workspace_limit
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.strategy import check_mode_name
from cudnn_autotune.store import rerank
from cudnn_autotune.store.provenance import Provenance


@dataclass(frozen=True)
class Decision:
    """What a search chose for a problem, and everything that it timed.

    Args:
        problem: The convolution. If its ``deterministic`` is set, only deterministic engines were
            measured.
        sampling: The name of the mode that measured.
        benchmark_limit: The most candidates that the mode was allowed to try; 0 means all.
        workspace_limit: The most bytes of workspace that a candidate was allowed; None means no
            limit.
        selection: The ranking, with the chosen candidate first; only candidates in ``rejected`` may
            precede it. The constructor drops candidates that were never timed, except the chosen
            one.
        relative_error: The relative error of the chosen candidate's output against a reference;
            None if it was not checked.
        rejected: Pairs ``(engine text, relative error)`` of the candidates whose output was wrong.
            An error that is not a finite number is stored as infinity.
        provenance: Who measured, with which versions, and when.
        omitted: The number of candidates that were timed but are not in ``selection``. A store
            keeps only those that a later question may need.

    Raises:
        TypeError, ValueError: An argument is not allowed; the message names it and what is allowed.
    """

    problem: ConvProblem
    sampling: str
    benchmark_limit: int
    workspace_limit: int | None
    selection: Selection
    relative_error: float | None = None
    rejected: tuple[tuple[str, float], ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    omitted: int = 0

    def __post_init__(self) -> None:
        for name, wanted in (("problem", ConvProblem), ("selection", Selection)):
            if not isinstance(getattr(self, name), wanted):
                got = shown(getattr(self, name))
                raise TypeError(f"{name} must be a {wanted.__name__}, got {got}")
        check_mode_name(self.sampling, "sampling")
        Node(self.benchmark_limit, "benchmark_limit").integer()
        Node(self.omitted, "omitted").integer()
        check_workspace_limit(self.workspace_limit)
        Node(self.relative_error, "relative_error").number_or_null()
        if not self.selection.ranking:
            raise ValueError("selection must rank at least one candidate, got an empty ranking")
        for entry in self.selection.ranking:
            if not isinstance(entry, Measurement) or not isinstance(entry.candidate, Candidate):
                raise TypeError(
                    "selection.ranking must hold Measurement, each of a Candidate, "
                    f"got {shown(entry)}"
                )
        object.__setattr__(self, "rejected", _all_rejected(self.rejected))
        chosen = self.chosen
        kept: dict[str, Measurement] = {}
        for entry in self.selection.ranking:
            if entry.time_ms is not None or entry is chosen:
                kept.setdefault(entry.candidate.text, entry)
        if len(kept) < len(self.selection.ranking):
            ranking = tuple(kept.values())
            object.__setattr__(self, "selection", replace(self.selection, ranking=ranking))

    @cached_property
    def key(self) -> str:
        """One readable line that identifies the problem, the mode and the benchmark limit.

        The constraints of the measurement (determinism and workspace limit) are not part of it,
        because one decision can answer several of them: see :meth:`restricted_to`.
        """
        return key_of(self.problem, self.sampling, self.benchmark_limit)

    @property
    def chosen(self) -> Measurement | None:
        """The first entry of the ranking that is not rejected, or None if all are."""
        wrong = {text for text, _ in self.rejected}
        return next((e for e in self.selection.ranking if e.candidate.text not in wrong), None)

    def restricted_to(self, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        """Returns the same measurement, ranked again for other constraints, without timing.

        The result lists only candidates that meet the constraints, were timed, and are not
        rejected. The chosen candidate stays first if it is among them; otherwise the fastest takes
        its place (see ``rerank``).

        Returns:
            The decision, or None if no candidate qualifies or if the measurement was made under
            tighter constraints and so lacks candidates.

        Raises:
            ValueError: ``workspace_limit`` is neither None nor a number of bytes.
        """
        check_workspace_limit(workspace_limit)
        lacks_nondeterministic = self.problem.deterministic and not deterministic
        if lacks_nondeterministic or not admits(self.workspace_limit, workspace_limit):
            return None
        chosen = self.chosen
        if chosen is None:
            return None
        selection = rerank.restricted_to(
            self.selection, chosen, dict(self.rejected), deterministic, workspace_limit
        )
        if selection is None:
            return None
        stayed = selection.winner.candidate.text == chosen.candidate.text
        return replace(
            self,
            problem=with_determinism(self.problem, deterministic),
            workspace_limit=workspace_limit,
            selection=selection,
            relative_error=self.relative_error if stayed else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the decision as plain JSON. Fields at their default are left out."""
        return {**json_dataclass.encode(self), "problem": problem_to_json(self.problem)}


def key_of(problem: ConvProblem, sampling: str = "auto", benchmark_limit: int = 0) -> str:
    """Returns the key of every decision for ``problem`` by this mode and benchmark limit."""
    # The mode's name comes last, so that keys stay distinct whatever a user calls a mode.
    return f"{problem_text(problem)} benchmark_limit={benchmark_limit} sampling={sampling}"


def with_determinism(problem: ConvProblem, deterministic: bool) -> ConvProblem:
    """Returns ``problem`` with its ``deterministic`` set to the given value."""
    if problem.deterministic == deterministic:
        return problem
    tree = {**problem_to_json(problem), "deterministic": deterministic}
    return problem_from_json(tree)


def was_cut_short(decision: Decision, budget_ms: float | None) -> bool:
    """Returns whether a budget left something out of the measurement that ``budget_ms``
    (milliseconds; None: no budget) would not, so that another search could find a faster one."""
    was_ms = decision.selection.evidence.budget_ms
    return was_ms is not None and (budget_ms is None or budget_ms > was_ms)


def admits(outer: int | None, inner: int | None) -> bool:
    """Returns whether the workspace limit ``outer`` is at least ``inner``; None is no limit."""
    return outer is None or (inner is not None and inner <= outer)


def _all_rejected(rejected: object) -> tuple[tuple[str, float], ...]:
    try:
        pairs = [(text, error) for text, error in cast("Iterable[tuple[str, float]]", rejected)]
        if all(isinstance(text, str) for text, _ in pairs):
            return tuple((text, _error(error)) for text, error in pairs)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"rejected must be pairs of a text and a number, got {shown(rejected)}")


def _error(value: float) -> float:
    # A NaN fails this comparison, and so becomes infinity as well.
    return float(value) if 0 <= value <= MOST else math.inf
