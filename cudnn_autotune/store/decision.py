"""A decision that lasts: the whole frontier that was measured for one problem, never an index."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

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
    """What was chosen for a problem, and everything that was timed on the way.

    Args:
        problem: its ``deterministic`` says whether only deterministic engines were measured.
        sampling: the mode that measured.
        benchmark_limit: how many candidates it was to look at; 0: all.
        workspace_limit: the bytes that a candidate was allowed; None: no limit.
        selection: the ranking, the chosen one first (those in ``rejected`` may come before it).
            Candidates that were never timed are dropped here, but for the chosen one.
        relative_error: of the chosen one's output against a reference; None: not checked.
        rejected: ``(engine text, relative error)`` of candidates whose output was wrong; an error
            that is no finite number is kept as infinity.
        omitted: how many more candidates were timed that ``selection`` does not list: a store keeps
            those that a later question needs.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed.
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
                told = shown(getattr(self, name))
                raise TypeError(f"{name} must be a {wanted.__name__}, got {told}")
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
        """The problem, without determinism, and who measured: one line, for people too.

        Constraints under which it was measured (determinism, workspace) are not part of it: see
        :meth:`restricted_to`.
        """
        return key_of(self.problem, self.sampling, self.benchmark_limit)

    @property
    def chosen(self) -> Measurement | None:
        """The first of the ranking whose output was not wrong; None where all were."""
        wrong = {text for text, _ in self.rejected}
        return next((e for e in self.selection.ranking if e.candidate.text not in wrong), None)

    def restricted_to(self, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        """The same measurement, ranked for other constraints; nothing is timed.

        The result ranks the candidates that may serve, and no other: within the limit,
        deterministic if asked for, timed, not rejected. The chosen one stays the chosen one if it
        may serve; else the fastest takes its place (see ``rerank``).

        Returns:
            None where it was measured under tighter constraints, since it then lacks candidates;
            where nothing in it may serve.

        Raises:
            ValueError: a limit that is no number of bytes.
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
        """Plain JSON; :meth:`from_json` is its inverse."""
        return {
            "problem": problem_to_json(self.problem),
            "sampling": self.sampling,
            "benchmark_limit": self.benchmark_limit,
            "workspace_limit": self.workspace_limit,
            "selection": self.selection.to_json(),
            "relative_error": self.relative_error,
            "rejected": [[text, e if math.isfinite(e) else None] for text, e in self.rejected],
            "provenance": self.provenance.to_json(),
            **({"omitted": self.omitted} if self.omitted else {}),
        }

    @classmethod
    def from_json(cls, tree: Any, place: str = "decision") -> Decision:
        """Raises ValueError naming the place and what is allowed there."""
        if isinstance(tree, dict):
            # "struck" is what "rejected" was once called.
            tree = {("rejected" if k == "struck" else k): v for k, v in tree.items()}
            tree.setdefault("omitted", 0)
        fields = Node(tree, place).fields(
            *("problem", "sampling", "benchmark_limit", "workspace_limit", "selection"),
            *("relative_error", "rejected", "provenance", "omitted"),
        )
        limit = fields["workspace_limit"]
        selection = fields["selection"]
        selection.object()
        try:
            return cls(
                problem=problem_from_json(fields["problem"].value, fields["problem"].place),
                sampling=fields["sampling"].text(),
                benchmark_limit=fields["benchmark_limit"].integer(),
                workspace_limit=None if limit.value is None else limit.integer(),
                selection=Selection.from_json(selection.value),
                relative_error=fields["relative_error"].number_or_null(),
                rejected=tuple(_rejected(node) for node in fields["rejected"].items()),
                provenance=Provenance.from_json(
                    fields["provenance"].value, fields["provenance"].place
                ),
                omitted=fields["omitted"].integer(),
            )
        except ValueError as error:
            if str(error).startswith(place):
                raise
            raise ValueError(f"{place}: {error}") from error


def key_of(problem: ConvProblem, sampling: str = "auto", benchmark_limit: int = 0) -> str:
    """The key of every decision for ``problem`` by this mode and limit."""
    # The mode's name comes last: whatever a user calls a mode, no two keys are alike.
    return f"{problem_text(problem)} benchmark_limit={benchmark_limit} sampling={sampling}"


def with_determinism(problem: ConvProblem, deterministic: bool) -> ConvProblem:
    if problem.deterministic == deterministic:
        return problem
    tree = {**problem_to_json(problem), "deterministic": deterministic}
    return problem_from_json(tree)


def admits(outer: int | None, inner: int | None) -> bool:
    """Whether a workspace limit of ``inner`` allows nothing that ``outer`` does not."""
    return outer is None or (inner is not None and inner <= outer)


def _rejected(node: Node) -> tuple[str, float]:
    pair = list(node.items())
    if len(pair) != 2:
        raise node.error("a list of a text and a relative error")
    error = pair[1].number_or_null()
    return pair[0].text(), math.inf if error is None else error


def _all_rejected(rejected: object) -> tuple[tuple[str, float], ...]:
    try:
        pairs = [(text, error) for text, error in cast("Iterable[tuple[str, float]]", rejected)]
        if all(isinstance(text, str) for text, _ in pairs):
            return tuple((text, _error(error)) for text, error in pairs)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"rejected must be pairs of a text and a number, got {shown(rejected)}")


def _error(value: float) -> float:
    # Not a number is in no range.
    return float(value) if 0 <= value <= MOST else math.inf
