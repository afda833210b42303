"""Compares the chosen candidate's time with that of the candidate that PyTorch would run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.store.decision import Decision


@dataclass(frozen=True)
class Compared:
    """PyTorch's time and ours, measured in the same way, in milliseconds."""

    pytorch_ms: float
    ours_ms: float
    least: float
    """The lower bound of ``ratio`` by the intervals of the times, which sustained runs lack. The
    bounds include 1 if the difference is not significant."""
    most: float
    """The upper bound of ``ratio``."""

    @property
    def ratio(self) -> float | None:
        """PyTorch's time over ours: above 1, ours is faster; None if nothing was compared."""
        return self.pytorch_ms / self.ours_ms if self.ours_ms else None

    @property
    def is_sure(self) -> bool:
        """Whether the times differ beyond their bounds, or are equal."""
        return self.least > 1 or self.most < 1 or self.least == self.most == 1


@dataclass(frozen=True)
class Against(Compared):
    """The comparison of one call."""

    text: str
    """The candidate that PyTorch runs with ``benchmark=False``: an engine config's text, or
    ``aten``."""
    is_sustained: bool
    """Whether both times are of sustained runs, at the steady clock."""
    is_rough: bool
    """Whether one of the times is of a single launch."""

    @property
    def is_sure(self) -> bool:
        return not self.is_rough and super().is_sure


def pytorchs_entry(selection: Selection) -> Measurement | None:
    """The ranking's entry for the candidate that PyTorch would run; None if the ranking has none.

    If PyTorch runs one of cuDNN's plans and that plan was timed, this is the plan's entry.
    """
    by_text = {entry.candidate.text: entry for entry in selection.ranking}
    own = by_text.get(ATEN.text)
    return own if own is None or not own.runs else by_text.get(own.runs, own)


def against_pytorch(decision: Decision) -> Against | None:
    """The comparison, or None if one of the two was not timed or nothing was chosen."""
    ours, theirs = decision.chosen, pytorchs_entry(decision.selection)
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
    if theirs.candidate.text in decision.selection.evidence.tied:
        least, most = min(least, 1.0), max(most, 1.0)
    return Against(
        text=theirs.candidate.text,
        pytorch_ms=pytorch_ms,
        ours_ms=ours_ms,
        is_sustained=is_sustained,
        is_rough=theirs is not ours and min(ours.samples, theirs.samples) <= 1,
        least=least,
        most=most,
    )


@dataclass(frozen=True)
class Total(Compared):
    """Sums over several decisions, each counted once. The comparison is of those that allow one."""

    decisions: int
    timed: int
    time_ms: float
    """Sum of the times of the timed ones: of sustained runs if measured, else of short batches."""
    compared: int
    workspace_bytes: int
    """The largest workspace; the calls run one after another."""
    wall_ms: float
    """Wall time of the searches."""


def total(decisions: Iterable[Decision]) -> Total:
    decisions = list(decisions)
    chosen = [entry for decision in decisions if (entry := decision.chosen) is not None]
    times = [ms for entry in chosen if (ms := entry.reported_ms) is not None]
    compared = [found for d in decisions if (found := against_pytorch(d)) is not None]
    ours_ms = sum(found.ours_ms for found in compared)
    return Total(
        decisions=len(decisions),
        timed=len(times),
        time_ms=sum(times),
        compared=len(compared),
        ours_ms=ours_ms,
        pytorch_ms=sum(found.pytorch_ms for found in compared),
        least=sum(found.least * found.ours_ms for found in compared) / (ours_ms or 1.0),
        most=sum(found.most * found.ours_ms for found in compared) / (ours_ms or 1.0),
        workspace_bytes=max((entry.candidate.workspace_bytes for entry in chosen), default=0),
        wall_ms=sum(decision.selection.evidence.wall_ms for decision in decisions),
    )
