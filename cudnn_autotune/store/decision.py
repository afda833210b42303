"""A decision for one problem: the chosen candidate, and all others measured with it.

Candidates are named by their engine and knobs, never by their index in cuDNN's list.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, cast

from cudnn_autotune.core import json_dataclass, versions
from cudnn_autotune.core.json_node import LARGEST_NUMBER, Node, shown
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.configs import OWN_PATH, Candidate, check_workspace_limit
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_text, problem_to_json
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.policy import Policy

NONDETERMINISTIC = "NONDETERMINISTIC"
"""cuDNN's note of a candidate whose output may differ in its bits from run to run."""


@dataclass(frozen=True)
class Provenance:
    """Versions and time of a measurement, for readers and to find the later of two decisions."""

    driver: str = ""
    torch: str = ""
    cudnn_autotune: str = ""
    time: str = "1970-01-01T00:00:00.000000Z"
    """The time of the measurement, in ISO 8601 with a time zone. It is stored in UTC as
    ``YYYY-MM-DDTHH:MM:SS.ffffffZ``, so that the texts sort as the times do."""
    revision: int = 0
    """A number that precedes ``time`` in a comparison of two decisions. After a clock was set back,
    a decision may replace one with a later time; it gets that one's revision plus one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _utc(self.time))
        Node(self.revision, "revision").integer()

    @classmethod
    def now(cls, driver: str | None = None) -> Provenance:
        """Returns the provenance of a measurement that this process makes now.

        Args:
            driver: The version of the GPU's driver; None looks it up.
        """
        found = versions.environment()
        return cls(
            driver=(found["driver"] or "") if driver is None else driver,
            torch=found["torch"],
            cudnn_autotune=found["cudnn_autotune"],
            time=datetime.now(UTC).isoformat(),
        )


@dataclass(frozen=True)
class Decision:
    """The choice of a search for a problem, and all timed candidates.

    Args:
        problem: The convolution. If its ``deterministic`` is set, only deterministic engines were
            measured.
        policy: The mode that measured, and its limits.
        selection: The evidence and the ranked candidates, the chosen one first; only candidates in
            ``rejected`` may precede it. The constructor drops candidates that were never timed,
            except the chosen one.
        relative_error: The relative error of the chosen candidate's output against a reference;
            None if it was not checked.
        rejected: Pairs ``(engine text, relative error)`` of the candidates whose output was wrong.
            An error that is not a finite number is stored as infinity.
        provenance: Versions and time of the measurement.
        omitted: The number of timed candidates that are not in ``selection``. A store keeps only
            candidates that a later question may need.

    Raises:
        TypeError, ValueError: An argument is not allowed; the message names it and what is allowed.
    """

    problem: ConvProblem
    policy: Policy
    selection: Selection
    relative_error: float | None = None
    rejected: tuple[tuple[str, float], ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    omitted: int = 0

    def __post_init__(self) -> None:
        wanted = (("problem", ConvProblem), ("policy", Policy), ("selection", Selection))
        for name, kind in wanted:
            if not isinstance(getattr(self, name), kind):
                got = shown(getattr(self, name))
                raise TypeError(f"{name} must be a {kind.__name__}, got {got}")
        Node(self.omitted, "omitted").integer()
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

    @property
    def sampling(self) -> str:
        """The name of the mode that measured."""
        return self.policy.mode

    @property
    def workspace_limit(self) -> int | None:
        """The most bytes of workspace that a candidate was allowed; None stands for no limit."""
        return self.policy.workspace

    @property
    def benchmark_limit(self) -> int:
        """The most candidates that the mode was allowed to try; 0 stands for all."""
        return self.policy.benchmark

    @cached_property
    def key(self) -> str:
        """One readable line that identifies the problem, the mode and the benchmark limit.

        The constraints of the measurement (determinism and workspace limit) are not part of it,
        because one decision can answer several of them: see :meth:`restricted_to`.
        """
        return key_of(self.problem, self.policy)

    @cached_property
    def chosen(self) -> Measurement | None:
        """The first entry of the ranking that is not rejected, or None if all are."""
        wrong = {text for text, _ in self.rejected}
        return next((e for e in self.selection.ranking if e.candidate.text not in wrong), None)

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate; PyTorch's own path if all are rejected."""
        return OWN_PATH if self.chosen is None else self.chosen.candidate

    def restricted_to(self, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        """Returns the same measurement, ranked again for other constraints, without timing.

        The result lists only candidates that meet the constraints, were timed, and are not
        rejected. The chosen candidate stays first if it is among them; otherwise the fastest takes
        its place (see :func:`ranked_again`).

        Returns:
            The decision, or None if no candidate qualifies or if the measurement was made under
            tighter constraints and so lacks candidates.

        Raises:
            ValueError: ``workspace_limit`` is neither None nor a number of bytes.
        """
        check_workspace_limit(workspace_limit)
        lacks_nondeterministic = self.problem.deterministic and not deterministic
        if lacks_nondeterministic or not admits(self.policy.workspace, workspace_limit):
            return None
        chosen = self.chosen
        if chosen is None:
            return None
        selection = ranked_again(
            self.selection, chosen, dict(self.rejected), deterministic, workspace_limit
        )
        if selection is None:
            return None
        problem, policy = self.problem, self.policy
        if problem.deterministic != deterministic:
            problem = replace(problem, deterministic=deterministic)
        if policy.workspace != workspace_limit:
            policy = replace(policy, workspace=workspace_limit)
        stayed = selection.winner.candidate.text == chosen.candidate.text
        return replace(
            self,
            problem=problem,
            policy=policy,
            selection=selection,
            relative_error=self.relative_error if stayed else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the decision as plain JSON. Fields at their default are left out."""
        tree = json_dataclass.encode(self)
        del tree["policy"]
        return {
            "problem": problem_to_json(self.problem),
            "sampling": self.sampling,
            "benchmark_limit": self.benchmark_limit,
            "workspace_limit": self.workspace_limit,
            **{name: value for name, value in tree.items() if name != "problem"},
        }


def key_of(problem: ConvProblem, policy: Policy | None = None) -> str:
    """Returns the key of every decision for ``problem`` by this mode and benchmark limit."""
    policy = policy or Policy()
    # The mode's name comes last, so that keys stay distinct for any name of a mode.
    return f"{problem_text(problem)} benchmark_limit={policy.benchmark} sampling={policy.mode}"


def was_cut_short(decision: Decision, budget_ms: float | None) -> bool:
    """Returns whether a budget cut the measurement short that ``budget_ms`` (milliseconds; None: no
    budget) would not. Another search could then find a faster candidate."""
    was_ms = decision.selection.evidence.budget_ms
    return was_ms is not None and (budget_ms is None or budget_ms > was_ms)


def admits(outer: int | None, inner: int | None) -> bool:
    """Returns whether the workspace limit ``outer`` is at least ``inner``; None is no limit."""
    return outer is None or (inner is not None and inner <= outer)


def utc_text(time: datetime) -> str:
    """Returns a time as ``Provenance.time`` stores it."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _utc(text: str) -> str:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError("it has no time zone")
        return utc_text(time)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"time: must be ISO 8601 with a time zone, as 2025-11-21T17:28:03Z, got {text!r}"
        ) from error


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
    return float(value) if 0 <= value <= LARGEST_NUMBER else math.inf


def _is_left_out(entry: Measurement) -> bool:
    """Returns whether an entry is PyTorch's own path, and was not timed."""
    return entry.candidate.id.is_own_path and entry.time_ms is None and not entry.runs


def ranked_again(
    selection: Selection,
    chosen: Measurement,
    rejected: Container[str],
    deterministic: bool,
    workspace_limit: int | None,
) -> Selection | None:
    """Returns ``selection`` with the entries that meet the constraints, the best one first.

    An implementation that this process has not registered, such as another application's, does not
    meet them either.

    The chosen entry stays first if it meets the constraints. Otherwise the fastest entry takes its
    place, and the others keep their order. Entries are compared by ``time_ms``, or by
    ``Measurement.score`` with the evidence's ``burst_weight``. The score needs a ``sustained_ms``
    of all entries within ``sustained_reach`` times the least ``time_ms``. ``ties.break_ties``
    chooses among entries within ``ties.TIE_WIDTH`` of the best.

    Args:
        chosen: The entry of ``selection`` that was chosen without the constraints.
        rejected: Texts of the candidates whose output was wrong.

    Returns:
        The selection, or None if no entry meets the constraints. It is also None if PyTorch's own
        path may be the fastest such entry and was not timed (``Limits.own_path_floor_ms``).
    """
    by_text = {entry.candidate.text: entry.candidate for entry in selection.ranking}

    def fits(candidate: Candidate) -> bool:
        is_allowed = admits(workspace_limit, candidate.workspace_bytes)
        varying = deterministic and varies(candidate)
        return is_allowed and not varying and not registry.is_absent(candidate.text)

    def qualifies(entry: Measurement) -> bool:
        if entry.candidate.text in rejected or not fits(entry.candidate):
            return False
        if entry is not chosen and entry.time_ms is None:
            return False
        # PyTorch's own path was timed with the plan `runs`, which must meet the constraints too. If
        # that plan was not measured itself, its workspace is unknown, and the path may serve.
        if entry.runs:
            plan = by_text.get(entry.runs)
            return plan is None or fits(plan)
        return True

    serving = [entry for entry in selection.ranking if qualifies(entry)]
    if not serving:
        return None
    out = set(by_text) - {entry.candidate.text for entry in serving}
    evidence = selection.evidence
    if any(entry is chosen for entry in serving):
        first, tied = chosen, [text for text in evidence.tied if text not in out]
        evidence = replace(evidence, tied=tuple(tied))
    elif any(_is_left_out(entry) for entry in selection.ranking):
        return None
    else:
        # PyTorch's own path has the times of the plan that it runs, if that was measured.
        own = [e.runs or e.candidate.text for e in serving if e.candidate.id.is_own_path]
        equal, rule = ties.break_ties(_fastest(serving, evidence), *own[:1])
        first = next(entry for entry in serving if entry.candidate is equal[0])
        evidence = replace(
            evidence,
            rule=f"re-ranked: {rule}",
            tied=tuple(candidate.text for candidate in equal),
            regret_bound=None,
            confidence=None,
            sustained_clock_mhz=None,
        )
    others = [entry for entry in serving if entry is not first]
    return replace(selection, ranking=(first, *others), evidence=evidence)


def varies(candidate: Candidate) -> bool:
    """Returns whether the candidate's output may differ in its bits from run to run."""
    # cuBLAS guarantees bitwise equal results only under conditions that are not checked here.
    return NONDETERMINISTIC in candidate.numerical_notes or candidate.id.kind == "matmul"


def _fastest(entries: Sequence[Measurement], evidence: Evidence) -> dict[Candidate, float]:
    """Returns the times in ms of the timed candidates that are tied with the fastest."""
    times = {entry: entry.time_ms for entry in entries if entry.time_ms is not None}
    near = min(times.values()) * evidence.sustained_reach
    # Sustained runs are made of the contenders only, so slower entries need not have one.
    for compared in (list(times), [entry for entry, ms in times.items() if ms <= near]):
        alone = {e: e.score(evidence.burst_weight) for e in compared if e.sustained_ms is not None}
        if len(alone) == len(compared):
            return _tied(alone)
    return _tied(times)


def _tied(times: Mapping[Measurement, float]) -> dict[Candidate, float]:
    limit = min(times.values()) * (1 + ties.TIE_WIDTH)
    return {entry.candidate: ms for entry, ms in times.items() if ms <= limit}
