"""A choice: the decision that serves a problem, its origin, and its tuning time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cudnn_autotune.core.display import html_table, milliseconds
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.roofline import Limit, limit
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.timers.lacking import NOTHING, Lacking
from cudnn_autotune.tuning.checking import OutputChecks

if TYPE_CHECKING:
    from cudnn_autotune.tuning.gain import Total


class _Facts:
    """Facts of a choice that follow from its decision."""

    problem: ConvProblem
    """The served convolution."""
    policy: Policy
    """The requested mode, workspace limit and benchmark limit."""
    sampling: str
    """The requested sampling mode."""
    workspace_limit: int | None
    """The most bytes of workspace that an engine may need; None stands for no limit."""
    benchmark_limit: int
    """The most candidates that the mode may time; 0 stands for all."""
    selection: Selection
    """Every candidate with its time, and the evidence for the choice."""
    provisional: str
    """The reason why the choice is not final, such as memory that was short; empty if it is final.
    A provisional choice serves, and is not stored. After some calls the problem is tuned again, if
    the lacking resources are there."""
    relative_error: float | None
    """Error of the output relative to a reference (``tuning.checking``); None if it was not
    checked, or if memory was short for a check."""
    rejected: tuple[tuple[str, float], ...]
    """``(engine text, relative error)`` of faster but wrong candidates."""
    provenance: Provenance | None
    """The provenance of the measurement, maybe another process's; None without one."""
    chosen: Measurement | None
    """The chosen candidate, with its time."""
    text: str
    """The engine config, as ``Candidate.text``; ``"aten"`` for PyTorch's own path, ``"matmul"``
    for a matrix product."""
    engine: int | None
    """cuDNN's engine number; None if cuDNN does not compute the problem."""
    knobs: Mapping[str, int]
    """The engine's knobs and their values, by name."""
    workspace_bytes: int
    """Bytes of workspace that the chosen candidate needs."""
    time_ms: float | None
    """Milliseconds a call as the mode measured it; None if the mode does not time candidates."""
    samples: int
    """Measurement launches of the chosen candidate."""
    total_samples: int
    """Measurement launches of all candidates."""
    ranking: tuple[tuple[str, float], ...]
    """``(engine text, milliseconds)`` of every timed candidate, the best first."""
    candidates: int
    """Number of candidates that were timed."""


@dataclass(frozen=True)
class Choice(_Facts):
    """The choice for one problem under one policy in this process."""

    decision: Decision
    """The part of the choice that is kept on disk and sent to other ranks."""
    device: int
    """Index of the CUDA device."""
    origin: str = "tuned"
    """The source of the decision: ``tuned`` (a search of this process), ``store``, ``agreed``
    (between ranks), ``pinned``, ``neighbour`` (no measurement: a winner at alike sizes of the
    layer, or PyTorch's own path), or ``missing`` (PyTorch's own path: a locked store lacks it)."""
    tuning_ms: float = 0.0
    """Milliseconds until the problem was served, with plan building and the output's check."""
    searched: Selection | None = None
    """The selection of this process's search, with candidates that failed before they were timed;
    None without a search."""
    lacking: Lacking = NOTHING
    """The resources that were short, and that a later search may have."""

    def __post_init__(self) -> None:
        decision, chosen = self.decision, self.decision.chosen
        selection = self.searched or decision.selection
        candidate = decision.candidate
        ranking = [
            (e.candidate.text, e.time_ms) for e in selection.ranking if e.time_ms is not None
        ]
        self.__dict__.update(
            problem=decision.problem,
            policy=decision.policy,
            sampling=decision.policy.mode,
            workspace_limit=decision.policy.workspace,
            benchmark_limit=decision.policy.benchmark,
            selection=selection,
            provisional=decision.selection.evidence.provisional,
            relative_error=decision.relative_error,
            rejected=decision.rejected,
            provenance=decision.provenance if decision.selection.total_samples else None,
            chosen=chosen,
            text=candidate.text,
            engine=candidate.engine,
            knobs=candidate.knobs,
            workspace_bytes=candidate.workspace_bytes,
            time_ms=chosen.time_ms if chosen else None,
            samples=chosen.samples if chosen else 0,
            total_samples=selection.total_samples,
            ranking=tuple(ranking),
            candidates=len(ranking),
        )

    def __repr__(self) -> str:
        parts = [self.text]
        if self.time_ms is not None:
            parts.append(f"{milliseconds(self.time_ms)} ms")
        parts.append(f"speedup {self._gain.ratio_in_words}")
        parts.append(f"{self.origin}, {self.sampling}" + (", provisional" * bool(self.provisional)))
        return f"Choice({self.problem.text}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        chosen = self.text if self.time_ms is None else f"{self.text}: {self.time_ms:.4g} ms"
        rule = self.decision.selection.evidence.rule_in_words
        rows = {
            "chosen": chosen,
            "why": f"{rule} ({self.sampling}, {self.origin})",
            "speedup": self._gain.ratio_in_words,
            "workspace": f"{self.workspace_bytes:,} bytes",
            "tuning": f"{self.tuning_ms:.1f} ms, {self.total_samples:,} launches",
            "provisional": self.provisional,
        }
        return html_table(self.problem.text, ((name, text) for name, text in rows.items() if text))

    @property
    def _gain(self) -> Total:
        with IMPORTING:
            from cudnn_autotune.tuning import gain
        return gain.total([self.decision])

    @property
    def pytorch_ms(self) -> float | None:
        """Milliseconds a call of PyTorch's default, measured in the same race as ``time_ms`` and in
        the same way; None if it was not measured."""
        with IMPORTING:
            from cudnn_autotune.tuning import gain
        found = gain.own_path_entry(self.decision.selection)
        return None if found is None else found.time_ms

    @property
    def speedup(self) -> float | None:
        """PyTorch's time over the chosen candidate's: above 1 the choice is faster, and 1 if
        PyTorch would run the same. It compares sustained runs if both had one, else ``pytorch_ms``
        and ``time_ms``; None if one of them was not measured."""
        return self._gain.ratio

    @property
    def limit(self) -> Limit | None:
        """The least time of the problem on this GPU, and its bound (``engines.roofline``); None if
        the GPU's peaks have not been measured (``cudnn-autotune env --measure``)."""
        with IMPORTING:
            from cudnn_autotune.store.peaks_file import peaks_of
        peaks = peaks_of(self.device)
        return None if peaks is None else limit(self.problem, peaks)

    @property
    def times_limit(self) -> float | None:
        """The ratio of ``time_ms`` to the limit; None if one of them is unknown. It may be below 1
        if the tensors fit into the cache, or by Winograd's algorithm."""
        found, time_ms = self.limit, self.time_ms
        return None if found is None or time_ms is None else found.times(time_ms)


def untimed(
    problem: ConvProblem, policy: Policy, chosen: Measurement, evidence: Evidence | None = None
) -> Decision:
    """Returns a decision for ``chosen`` without measurements."""
    selection = Selection((chosen,), 0, evidence or Evidence())
    policy = policy if policy.probe is None else replace(policy, probe=None)
    return Decision(problem, policy, selection)


def for_want_of(choice: Choice, what: Lacking) -> Choice:
    """Returns ``choice`` as provisional for lack of ``what``, or as final if ``what`` is empty. The
    evidence of its decision and of its search say so."""

    said = {s.evidence.provisional for s in (choice.decision.selection, choice.selection)}
    if what == choice.lacking and said == {str(what)}:
        return choice

    def noted(selection: Selection) -> Selection:
        return replace(selection, evidence=replace(selection.evidence, provisional=str(what)))

    decision = replace(choice.decision, selection=noted(choice.decision.selection))
    searched = choice.searched and noted(choice.searched)
    return replace(choice, decision=decision, searched=searched, lacking=what)


def of_search(
    problem: ConvProblem,
    policy: Policy,
    device: int,
    selection: Selection | None = None,
    checks: OutputChecks | None = None,
    chosen: Measurement | None = None,
    lacks: Lacking = NOTHING,
) -> Choice:
    """Returns the choice of a search that has just ended on ``device``. It is provisional if the
    search lacked resources. Without a ``chosen`` entry, PyTorch's own path serves."""
    decision = untimed(problem, policy, chosen or Measurement(OWN_PATH, None, 0))
    checks = checks or OutputChecks()
    if selection is not None and checks.failures:
        ranking = [_failed(entry, checks.failures) for entry in selection.ranking]
        selection = replace(selection, ranking=tuple(ranking))
    if selection is not None and chosen is not None:
        text = chosen.candidate.text
        others = (entry for entry in selection.ranking if entry.candidate.text != text)
        decision = replace(
            decision,
            selection=replace(selection, ranking=(chosen, *others)),
            relative_error=checks.errors.get(text),
            provenance=provenance_now(device) if selection.total_samples else Provenance(),
        )
    decision = replace(decision, rejected=tuple(checks.rejected))
    return for_want_of(Choice(decision, device, searched=selection), lacks)


def _failed(entry: Measurement, failures: Mapping[str, str]) -> Measurement:
    """Returns an entry without its time if its candidate has failed since; else as it is."""
    why = failures.get(entry.candidate.text)
    if why is None:
        return entry
    return Measurement(entry.candidate, None, 0, eliminated=f"failed: {why}")


def provenance_now(device: int) -> Provenance:
    """Returns the provenance of measurements that this process makes on ``device`` now."""
    driver = environment(device)["driver"] if torch.cuda.is_available() else None
    return Provenance.now(driver or "")
