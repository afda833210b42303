"""A decision as the page shows it: texts, and where the marks of its plots lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.report import reasons
from cudnn_autotune.cli.report.against import Against, against_pytorch, pytorchs_entry
from cudnn_autotune.cli.report.axis import Axis
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store.decision import Decision


@dataclass(frozen=True)
class Mark:
    """Places on the axis, in percent."""

    time: float
    low: float | None
    high: float | None
    sustained: float | None
    beyond: bool
    """Slower than the axis is long."""
    label: str
    """What the marks say, for those who do not see them."""


@dataclass(frozen=True)
class Row:
    """A candidate."""

    text: str
    tags: tuple[tuple[str, str], ...]
    """Kind and text of what sets it apart: chosen, tied, PyTorch's pick, wrong."""
    kind: str
    """``chosen``, ``tied``, ``rejected`` or ``other``."""
    notes: tuple[str, ...]
    time: str
    interval: str
    sustained: str
    workspace: str
    samples: str
    why: str
    """Why it left the search; empty for one that stayed."""
    mark: Mark | None


@dataclass(frozen=True)
class Shown:
    """One decision."""

    id: str
    op: str
    shapes: str
    dtype: str
    layout: str
    key: str
    sampling: str
    engine: str
    time: str
    time_ms: float
    """To sort by; infinite where it was not timed."""
    workspace: str
    workspace_bytes: int
    against: Against | None
    ratio: str
    gain: float | None
    """The ratio, where it is sure."""
    why: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: str
    ticks: tuple[tuple[float, str], ...]
    best: float | None
    """Where the chosen one's time lies on the axis."""


def shown(decision: Decision, number: int, most: int) -> Shown:
    """
    Args:
        number: of the decision on the page, from 1.
        most: how many candidates are listed, beside those that tell why (the chosen one, the tied,
            PyTorch's pick, the wrong ones).
    """
    chosen, against = decision.chosen, against_pytorch(decision)
    candidate = chosen.candidate if chosen else ATEN
    ms = chosen.reported_ms if chosen else None
    listed = _listed(decision, most)
    axis = Axis.of(listed)
    ticks = [] if axis is None else axis.ticks()
    in_turns = chosen.time_ms if chosen else None
    problem = decision.problem
    return Shown(
        id=f"d{number}",
        op=problem.op,
        shapes=wording.shapes(problem),
        dtype=wording.dtype(problem),
        layout=wording.layout(problem),
        key=decision.key,
        sampling=decision.sampling,
        engine=candidate.text,
        time=wording.milliseconds(ms),
        time_ms=math.inf if ms is None else ms,
        workspace=wording.size(candidate.workspace_bytes),
        workspace_bytes=candidate.workspace_bytes,
        against=against,
        ratio=wording.ratio(against.ratio, against.is_sure) if against else wording.NONE,
        gain=against.ratio if against and against.is_sure else None,
        why=reasons.why(decision, against),
        facts=reasons.facts(decision),
        remarks=decision.selection.evidence.remarks,
        rows=_rows(decision, listed, axis),
        left_out=_left_out(decision, listed),
        ticks=tuple((axis.percent(tick), f"{tick:.6g}") for tick in ticks if axis is not None),
        best=None if axis is None or in_turns is None else axis.percent(in_turns),
    )


def _listed(decision: Decision, most: int) -> list[Measurement]:
    ranking = decision.selection.ranking
    telling = {text for text, _ in decision.rejected} | set(decision.selection.evidence.tied)
    own = pytorchs_entry(decision.selection)
    telling |= {ATEN.text} | ({own.candidate.text} if own else set())
    if decision.chosen:
        telling.add(decision.chosen.candidate.text)
    return [
        entry
        for place, entry in enumerate(ranking)
        if place < most or entry.candidate.text in telling
    ]


def _left_out(decision: Decision, listed: Sequence[Measurement]) -> str:
    seen = {id(entry) for entry in listed}
    rest = [entry for entry in decision.selection.ranking if id(entry) not in seen]
    times = [entry.time_ms for entry in rest if entry.time_ms is not None]
    if not times:
        return ""
    span = wording.milliseconds(min(times))
    if len(times) > 1:
        span += f" to {wording.milliseconds(max(times))}"
    return f"{wording.count(len(times), 'more candidate')} of {span} ms."


def _rows(decision: Decision, listed: Sequence[Measurement], axis: Axis | None) -> tuple[Row, ...]:
    chosen, own = decision.chosen, pytorchs_entry(decision.selection)
    errors, tied = dict(decision.rejected), set(decision.selection.evidence.tied)

    def tags(entry: Measurement) -> Iterator[tuple[str, str]]:
        text = entry.candidate.text
        if entry is chosen:
            yield "chosen", "chosen"
        elif text in errors:
            yield "rejected", f"wrong: relative error {reasons.error_text(errors[text])}"
        elif text in tied:
            yield "tied", "tied"
        if text == ATEN.text:
            yield "other", "PyTorch's own path"
        elif entry is own:
            yield "other", "PyTorch's pick"

    return tuple(_row(entry, tuple(tags(entry)), axis) for entry in listed)


def _row(entry: Measurement, tags: tuple[tuple[str, str], ...], axis: Axis | None) -> Row:
    candidate = entry.candidate
    return Row(
        text=candidate.text,
        tags=tags,
        kind=tags[0][0] if tags else "other",
        notes=tuple(note.replace("_", " ").lower() for note in candidate.notes),
        time=wording.milliseconds(entry.time_ms),
        interval=wording.interval(entry.low_ms, entry.high_ms),
        sustained=wording.milliseconds(entry.sustained_ms),
        workspace=wording.size(candidate.workspace_bytes),
        samples=f"{entry.samples:,}",
        why=entry.eliminated,
        mark=None if axis is None or entry.time_ms is None else _mark(entry, entry.time_ms, axis),
    )


def _mark(entry: Measurement, time_ms: float, axis: Axis) -> Mark:
    said = [f"{wording.milliseconds(time_ms)} ms"]
    low = high = None
    if entry.low_ms is not None and entry.high_ms is not None:
        low, high = axis.percent(entry.low_ms), axis.percent(entry.high_ms)
        said.append(f"interval {wording.milliseconds(entry.low_ms)} to "
                    f"{wording.milliseconds(entry.high_ms)} ms")  # fmt: skip
    alone = entry.sustained_ms
    if alone is not None:
        said.append(f"{wording.milliseconds(alone)} ms alone")
    beyond = axis.is_beyond(time_ms)
    if beyond:
        said.append("beyond the axis")
    return Mark(
        time=axis.percent(time_ms),
        low=low,
        high=high,
        sustained=None if alone is None or axis.is_beyond(alone) else axis.percent(alone),
        beyond=beyond,
        label=", ".join(said),
    )
