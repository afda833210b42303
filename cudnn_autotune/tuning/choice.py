"""A choice: the decision that serves a problem, its origin, and its tuning time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.roofline import Limit, limit
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.store import Decision, Provenance
from cudnn_autotune.store.peaks_file import peaks_of
from cudnn_autotune.timers.lacking import NOTHING, Lacking
from cudnn_autotune.tuning.output_check import OutputChecks


@dataclass(frozen=True)
class Choice:
    """The choice for one problem under one policy in this process."""

    decision: Decision
    """The choice as it is kept on disk and sent to other ranks."""
    device: int
    """Index of the CUDA device."""
    origin: str = "tuned"
    """Where the decision comes from: ``tuned`` (searched for by this process), ``store``,
    ``agreed`` (between ranks), ``pinned``, or ``neighbour`` (nothing was measured: what won on a
    near size of the layer serves a new one, or the heuristics' first plan if that cannot)."""
    tuning_ms: float = 0.0
    """Wall time until the problem was served, in milliseconds; a search includes plan building and
    the check of the output."""
    searched: Selection | None = None
    """The selection of this process's search, with the candidates that failed before they were
    timed; None if this process did not search."""
    lacking: Lacking = NOTHING
    """The resources that it was made without, and that a later search may have."""

    @property
    def problem(self) -> ConvProblem:
        """The convolution that is served."""
        return self.decision.problem

    @property
    def sampling(self) -> str:
        """The sampling mode that was asked for."""
        return self.decision.sampling

    @property
    def workspace_limit(self) -> int | None:
        """The most bytes of workspace that an engine may need; None stands for no limit."""
        return self.decision.workspace_limit

    @property
    def benchmark_limit(self) -> int:
        """How many candidates the mode may time; 0 stands for all."""
        return self.decision.benchmark_limit

    @property
    def policy(self) -> tuple[str, int | None, int]:
        """The mode, the workspace limit and the benchmark limit that were asked for."""
        return self.sampling, self.workspace_limit, self.benchmark_limit

    @property
    def chosen(self) -> Measurement | None:
        """The chosen candidate, with its time."""
        return self.decision.chosen

    @property
    def text(self) -> str:
        """The engine config, as ``Candidate.text``; ``"aten"`` for PyTorch's own path, ``"matmul"``
        for a matrix product."""
        return self.chosen.candidate.text if self.chosen else ATEN.text

    @property
    def selection(self) -> Selection:
        """Every candidate with its time, and the evidence for the choice."""
        return self.searched or self.decision.selection

    @property
    def provisional(self) -> str:
        """Why the choice is not final, such as ``12 candidates were left out for want of memory``;
        empty if it is. A provisional choice serves, and is not stored; after some calls the problem
        is tuned again, if what was lacking can be had then."""
        return self.decision.selection.evidence.provisional

    @property
    def relative_error(self) -> float | None:
        """Error of the output relative to a reference (``tuning.checking``); None if no output was
        checked, or if the free memory did not allow a check that tells right from wrong."""
        return self.decision.relative_error

    @property
    def rejected(self) -> tuple[tuple[str, float], ...]:
        """``(engine text, relative error)`` of candidates that were faster but wrong."""
        return self.decision.rejected

    @property
    def provenance(self) -> Provenance | None:
        """The provenance of the measurement, which may be another process's; None if nothing was
        measured."""
        return self.decision.provenance if self.decision.selection.total_samples else None

    @property
    def engine(self) -> int | None:
        """cuDNN's engine number; None where cuDNN does not compute the problem."""
        return self.chosen.candidate.engine if self.chosen else None

    @property
    def knobs(self) -> Mapping[str, int]:
        """The engine's knobs and their values, by name."""
        return self.chosen.candidate.knobs if self.chosen else {}

    @property
    def time_ms(self) -> float | None:
        """Milliseconds a call as the mode measured it; None if the mode does not time
        candidates."""
        return self.chosen.time_ms if self.chosen else None

    @property
    def limit(self) -> Limit | None:
        """The least time of the problem on this GPU, and what binds it (``engines.roofline``); None
        if the GPU's peaks have not been measured (``cudnn-autotune env --measure``)."""
        peaks = peaks_of(self.device)
        return None if peaks is None else limit(self.problem, peaks)

    @property
    def times_limit(self) -> float | None:
        """How many times the limit ``time_ms`` is; None if one of them is not known. It may be
        below 1 where the tensors fit into the cache, or by Winograd's algorithm."""
        found, time_ms = self.limit, self.time_ms
        return None if found is None or time_ms is None else found.times(time_ms)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that the chosen candidate needs."""
        return self.chosen.candidate.workspace_bytes if self.chosen else 0

    @property
    def samples(self) -> int:
        """Measurement launches of the chosen candidate."""
        return self.chosen.samples if self.chosen else 0

    @property
    def total_samples(self) -> int:
        """Measurement launches of all candidates."""
        return self.selection.total_samples

    @property
    def ranking(self) -> tuple[tuple[str, float], ...]:
        """``(engine text, milliseconds)`` of every candidate that was timed, best first."""
        entries = self.selection.ranking
        return tuple((e.candidate.text, e.time_ms) for e in entries if e.time_ms is not None)

    @property
    def candidates(self) -> int:
        """How many candidates were timed."""
        return len(self.ranking)


def untimed(
    problem: ConvProblem,
    sampling: str,
    workspace_limit: int | None,
    benchmark_limit: int,
    chosen: Measurement,
    evidence: Evidence | None = None,
) -> Decision:
    """Returns a decision for ``chosen`` without measurements."""
    selection = Selection((chosen,), 0, evidence or Evidence())
    return Decision(problem, sampling, benchmark_limit, workspace_limit, selection)


def for_want_of(choice: Choice, what: Lacking) -> Choice:
    """Returns ``choice`` as one that is provisional for want of ``what``, or final for want of
    nothing. The evidence of its decision and that of its search say so."""

    def noted(selection: Selection) -> Selection:
        return replace(selection, evidence=replace(selection.evidence, provisional=str(what)))

    decision = replace(choice.decision, selection=noted(choice.decision.selection))
    searched = choice.searched and noted(choice.searched)
    return replace(choice, decision=decision, searched=searched, lacking=what)


def with_selection(
    decision: Decision, selection: Selection, chosen: Measurement, checks: OutputChecks, device: int
) -> Decision:
    """Returns ``decision`` with the selection just measured on ``device``; ``chosen`` comes
    first."""
    text = chosen.candidate.text
    others = (entry for entry in selection.ranking if entry.candidate.text != text)
    return replace(
        decision,
        selection=replace(selection, ranking=(chosen, *others)),
        relative_error=checks.errors.get(text),
        rejected=tuple(checks.rejected),
        provenance=provenance_now(device) if selection.total_samples else Provenance(),
    )


def provenance_now(device: int) -> Provenance:
    """Returns the provenance of measurements that this process makes on ``device`` now."""
    driver = environment(device)["driver"] if torch.cuda.is_available() else None
    return Provenance.now(driver or "")
