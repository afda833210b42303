"""The record of an audit: the true times, what each mode picked, and PyTorch's times.

One :class:`Record` serves audits of a GPU and of recordings. A *case* is one convolution in one
direction and dtype. A candidate goes by its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from cudnn_autotune.sampling import Selection

BURST_COLD = "burst cold"
"""Short batches that take turns; each call reads operands that left the L2 cache long ago."""
BURST_HOT = "burst hot"
"""Short batches that take turns; all calls use one set of operands."""
BURST = "burst"
"""The geometric mean of both: in a model, operands are partly in the cache."""
SUSTAINED = "sustained"
"""Sustained runs; the geometric mean of cold and hot."""
STEADY = "steady"
"""Sustained if it was measured, else burst: the best estimate of the time in a long run."""
TRUTHS = (STEADY, SUSTAINED, BURST, BURST_COLD, BURST_HOT)

PEAKS = "peaks"
"""The key of the GPU's measured peaks (``expert.Peaks``) in ``Record.environment``, where
they are known."""

PYTORCH_MODES = {
    "pytorch_off": (False, 10),
    "pytorch_on_10": (True, 10),
    "pytorch_on_0": (True, 0),
}
"""``torch.backends.cudnn.benchmark`` and ``benchmark_limit`` (0: every plan) by name."""


@dataclass(frozen=True)
class Truth:
    """The times of the candidates of a case that could be the best, or that were picked.

    Raises:
        ValueError: there is no time, or one that is not above 0.
    """

    times_ms: dict[str, float]
    """Milliseconds of a call."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative standard errors of times over the fastest, paired by round; 0 if it is not here."""

    def __post_init__(self) -> None:
        if not self.times_ms:
            raise ValueError("times_ms must not be empty")
        for text, time_ms in self.times_ms.items():
            if not time_ms > 0:
                raise ValueError(f"times_ms.{text} must be above 0, got {time_ms}")

    @property
    def best(self) -> str:
        return min(self.times_ms, key=self.times_ms.__getitem__)


@dataclass(frozen=True)
class Oracle:
    """The outcome of a long measurement of one case; ``truths`` is empty if it failed."""

    FORMER_FIELDS: ClassVar[tuple[str, ...]] = (
        *("clock_mhz", "max_clock_mhz", "solo_clock_mhz", "wall_ms"),
    )
    truths: dict[str, Truth] = field(default_factory=dict)
    """``burst cold``, ``burst hot`` and, if it was measured, ``sustained``."""
    candidates: int = 0
    """Number of candidates."""
    failed: dict[str, str] = field(default_factory=dict)
    """Candidates that do not build or run, and why."""
    solo: str = "never"
    """When candidates get sustained runs (``OracleSettings.solo``)."""
    remarks: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Pick:
    """The choice of one run of a mode for a case; if ``text`` is None, ``error`` says why."""

    FORMER_FIELDS: ClassVar[tuple[str, ...]] = (
        *("clock_mhz", "confidence", "disturbed", "gpu_ms", "passed_over", "peak_mb", "samples"),
        *("sustained_clock_mhz", "throttle_reasons"),
    )
    text: str | None = None
    tuning_ms: float | None = None
    """Wall time in milliseconds that the first call spends on choosing, plan building included."""
    time_ms: float | None = None
    """Milliseconds of a call, as the mode measured it."""
    regret_bound: float | None = None
    """Largest relative loss to the best that the mode claims (0.01: 1 %)."""
    bound_truth: str = BURST
    """The truth to which the bound refers."""
    rule: str = ""
    rejected: dict[str, float | None] = field(default_factory=dict)
    """Relative errors of faster candidates whose output was wrong; None stands for infinity."""
    lacking: tuple[str, ...] = ()
    """The samples that the mode needed and the recording lacks."""
    remarks: tuple[str, ...] = ()
    error: str = ""

    @classmethod
    def of(cls, selection: Selection | None, tuning_ms: float) -> Pick:
        """The pick of a mode's ``selection``; None means that no candidate ran."""
        if selection is None:
            return cls(tuning_ms=tuning_ms, error="no candidate runs")
        winner, evidence = selection.winner, selection.evidence
        # A leader that had a sustained run, but no contenders, was still chosen by the race.
        alone = sum(timed.sustained_ms is not None for timed in selection.ranking)
        return cls(
            text=winner.candidate.text,
            tuning_ms=tuning_ms,
            time_ms=winner.time_ms,
            regret_bound=evidence.regret_bound,
            bound_truth=SUSTAINED if alone > 1 else BURST,
            rule=evidence.rule,
            remarks=evidence.remarks,
        )


@dataclass(frozen=True)
class Ratio:
    """PyTorch's time over our pick's, paired by round."""

    median: float
    low: float
    """First quartile over the rounds."""
    high: float
    """Third quartile."""
    error: float = 0.0
    """Relative standard error of the median."""


@dataclass(frozen=True)
class PytorchRow:
    """PyTorch's own call of a case, taking turns with our reference mode's pick."""

    reference: str | None = None
    """The candidate that PyTorch was compared with."""
    ratios: dict[str, Ratio] = field(default_factory=dict)
    """PyTorch's time over the reference's, by truth that was measured; above 1, PyTorch is
    slower."""
    tuning_ms: float | None = None
    """Wall time of its first call in milliseconds, less a steady call."""
    solo: str = "never"
    """See ``Oracle.solo``."""
    error: str = ""


@dataclass
class Record:
    """The results of an audit, to which it adds as it goes on."""

    FORMER_FIELDS: ClassVar[tuple[str, ...]] = ("seconds",)

    kind: str
    """``gpu`` or ``replay``."""
    settings: dict[str, Any]
    """The options of the audit."""
    environment: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The description of each case, by its id."""
    oracle: dict[str, Oracle] = field(default_factory=dict)
    picks: dict[str, dict[str, dict[str, Pick]]] = field(default_factory=dict)
    """The picks by mode, run (``"1"``, ``"2"``, ...) and case id."""
    pytorch: dict[str, dict[str, PytorchRow]] = field(default_factory=dict)
    """The comparisons by PyTorch's mode and case id."""
    failures: list[str] = field(default_factory=list)
    """One line for each process that died or hung."""
    telemetry: dict[str, Any] | None = None
    """Clock, power, temperature and throttle reasons of the latest session."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """Environment and telemetry of earlier sessions."""
    complete: bool = False

    def picks_of(self, case: str) -> list[str]:
        """Returns every candidate that was picked for a case, or that PyTorch was compared with."""
        texts = {
            pick.text
            for runs in self.picks.values()
            for by_case in runs.values()
            if (pick := by_case.get(case)) and pick.text
        }
        rows = (by_case.get(case) for by_case in self.pytorch.values())
        texts |= {row.reference for row in rows if row and row.reference}
        return sorted(texts)
