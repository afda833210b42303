"""The gain over PyTorch of a decision, a model's step or a store, in times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cudnn_autotune.core.display import count, milliseconds
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.store.decision import Decision


@dataclass(frozen=True)
class Gain:
    """PyTorch's time and ours, measured in the same way, in milliseconds."""

    pytorch_ms: float
    ours_ms: float
    least: float
    """The lower bound of ``ratio`` by the times' intervals, which sustained runs lack. The bounds
    include 1 if the difference is not significant."""
    most: float
    """The upper bound of ``ratio``."""

    @property
    def ratio(self) -> float | None:
        """PyTorch's time over ours: above 1, ours is faster; None without a comparison."""
        return self.pytorch_ms / self.ours_ms if self.ours_ms else None

    @property
    def is_sure(self) -> bool:
        """Whether the times differ beyond their bounds, or are equal."""
        return self.least > 1 or self.most < 1 or self.least == self.most == 1

    def to_json(self) -> dict[str, float | None]:
        """Returns the comparison as plain JSON; None stands for a missing comparison."""
        ratio = self.ratio
        pytorch_ms, ours_ms = (None, None) if ratio is None else (self.pytorch_ms, self.ours_ms)
        return {"pytorch_ms": pytorch_ms, "ours_ms": ours_ms, "speedup": ratio}


@dataclass(frozen=True)
class Against(Gain):
    """The comparison of one call."""

    text: str
    """The candidate that PyTorch runs with ``benchmark=False``: an engine config's text, or
    ``aten``."""
    is_sustained: bool
    """Whether both times are of sustained runs, at the steady clock."""
    is_rough: bool
    """Whether one of the times is of a single launch."""


def own_path_entry(selection: Selection) -> Measurement | None:
    """Returns the ranking's entry for the candidate that PyTorch would run; None if the ranking has
    none.

    If PyTorch runs one of cuDNN's plans and that plan was timed, this is the plan's entry.
    """
    by_text = {entry.candidate.text: entry for entry in selection.ranking}
    own = by_text.get(OWN_PATH.text)
    return own if own is None or not own.runs else by_text.get(own.runs, own)


def against_pytorch(decision: Decision) -> Against | None:
    """Returns the comparison, or None if a time or the chosen candidate is missing."""
    ours, theirs = decision.chosen, own_path_entry(decision.selection)
    if ours is None or theirs is None:
        return None
    is_sustained = ours.sustained_ms is not None and theirs.sustained_ms is not None
    ours_ms = ours.sustained_ms if is_sustained else ours.time_ms
    pytorch_ms = theirs.sustained_ms if is_sustained else theirs.time_ms
    if not ours_ms or not pytorch_ms:
        return None
    least = most = pytorch_ms / ours_ms
    if theirs is not ours and not is_sustained:
        least = (theirs.low_ms or pytorch_ms) / (ours.high_ms or ours_ms)
        most = (theirs.high_ms or pytorch_ms) / (ours.low_ms or ours_ms)
    is_rough = theirs is not ours and min(ours.samples, theirs.samples) <= 1
    if is_rough or theirs.candidate.text in decision.selection.evidence.tied:
        least, most = min(least, 1.0), max(most, 1.0)
    return Against(
        text=theirs.candidate.text,
        pytorch_ms=pytorch_ms,
        ours_ms=ours_ms,
        is_sustained=is_sustained,
        is_rough=is_rough,
        least=least,
        most=most,
    )


@dataclass(frozen=True)
class Total(Gain):
    """Sums over several decisions. The comparison leaves out decisions that do not allow one. Times
    are multiplied by each one's number of calls."""

    decisions: int
    """Number of decisions."""
    timed: int
    """Number of decisions whose choice has a time."""
    time_ms: float
    """Sum of the known times in milliseconds: of sustained runs if measured, else of short
    batches."""
    compared: int
    """Number of decisions whose time can be compared with PyTorch's."""
    same: int
    """Number of compared decisions whose chosen candidate PyTorch would run."""
    calls: int
    """Number of calls, also of problems without a decision."""
    compared_calls: int
    """Number of calls of the compared decisions."""
    workspace_bytes: int
    """Bytes of the largest workspace; the calls run one after another."""
    wall_ms: float
    """Wall time of the searches in milliseconds."""

    def line(self, subject: str = "", *, is_step: bool = False, took_s: float | None = None) -> str:
        """Returns the gain in one line, with its unknown parts.

        Args:
            subject: the owner of the decisions, such as a model's name.
            is_step: whether the numbers of calls are a model's step.
            took_s: seconds that the tuning took.
        """
        number = self.compared_calls
        where = f"a step by estimate of its {count(number, 'convolution call')}"
        if not is_step:
            each = "each of " if number > 1 else ""
            where = f"for one call of {each}{count(number, 'convolution')}"
        if not self.calls:
            text = "no convolution was decided"
        elif self.ratio is None:
            text = "gain over PyTorch not known, since its time was not measured"
        else:
            times = f"{milliseconds(self.pytorch_ms)} -> {milliseconds(self.ours_ms)} ms"
            text = f"{times} {where} ({self.ratio_in_words})"
        if took_s is not None:
            text += f", tuned in {took_s:.1f} s"
        if number and (others := self.calls - number):
            text += f"; {others:,} more not counted, since PyTorch's time is not known"
        return f"{subject}: {text}" if subject else text

    @property
    def ratio_in_words(self) -> str:
        """The ratio, and whether it may be noise."""
        if self.ratio is None:
            return "unknown"
        if self.same == self.compared:
            return "1.00x: PyTorch would run the same"
        return f"{self.ratio:.2f}x" + ("" if self.is_sure else ", which may be noise")

    def to_json(self) -> dict[str, float | None]:
        """Returns the content of :meth:`line` as plain JSON."""
        return {
            **super().to_json(),
            "calls": self.calls,
            "compared_calls": self.compared_calls,
        }


def total(decisions: Iterable[Decision], calls: Mapping[ConvProblem, int] | None = None) -> Total:
    """Returns the sums.

    Args:
        calls: The number of calls of each problem; None counts each decision once.
    """
    decisions = list(decisions)
    chosen, times, compared = [], [], []
    for decision in decisions:
        n = 1 if calls is None else calls.get(decision.problem, 0)
        entry = decision.chosen
        if entry is not None:
            chosen.append(entry)
            if (ms := entry.reported_ms) is not None:
                times.append(n * ms)
        if n and (found := against_pytorch(decision)) is not None:
            compared.append((n, found, entry is not None and entry.candidate.text == found.text))
    ours_ms = sum(n * found.ours_ms for n, found, _ in compared)
    return Total(
        decisions=len(decisions),
        timed=len(times),
        time_ms=sum(times),
        compared=len(compared),
        same=sum(is_same for _, _, is_same in compared),
        calls=len(decisions) if calls is None else sum(calls.values()),
        compared_calls=sum(n for n, _, _ in compared),
        ours_ms=ours_ms,
        pytorch_ms=sum(n * found.pytorch_ms for n, found, _ in compared),
        least=sum(n * found.least * found.ours_ms for n, found, _ in compared) / (ours_ms or 1.0),
        most=sum(n * found.most * found.ours_ms for n, found, _ in compared) / (ours_ms or 1.0),
        workspace_bytes=max((entry.candidate.workspace_bytes for entry in chosen), default=0),
        wall_ms=sum(decision.selection.evidence.wall_ms for decision in decisions),
    )


def by_mode(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    """Returns the decisions of each mode, which are not added up: modes may share problems."""
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        found.setdefault(decision.sampling, []).append(decision)
    return found


def lines(decisions: Iterable[Decision]) -> list[str]:
    """Returns the gain of a store's decisions, in one line for each mode."""
    modes = by_mode(decisions)
    return [
        total(of_mode).line(f"By {mode}" if len(modes) > 1 else "")
        for mode, of_mode in modes.items()
    ]
