"""What a record of board_power.py says: how far blocks of one candidate differ, as measured and at
the power limit, and how the power goes with the clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from common import numbers

from cudnn_autotune.timers.board_power import EXPONENT, FAR, NEAR, arrived, at_limit_ms
from cudnn_autotune.timers.telemetry import GpuState

# Of a short block, what counts as measured, and of a long one.
_SHORT_SHARE = 1 / 3
_LONG_SHARE = 3 / 4


@dataclasses.dataclass(frozen=True)
class Alone:
    """A candidate of a case in its blocks."""

    case: str
    text: str
    clock_mhz: float | None
    """Mean SM clock of all its blocks, without their first 30 ms."""
    measured_ms: tuple[float, ...]
    """A call in the last third of each short block."""
    at_limit_ms: tuple[float | None, ...]
    """A call at the power limit, by the readings in each short block that are near it; None where
    it has none."""
    far: tuple[tuple[float, float], ...]
    """(as measured, at the power limit), a call in milliseconds, of each short block whose readings
    are all far from the limit."""
    long_ms: float | None
    """A call in the last three quarters of the long blocks."""

    @property
    def far_ratios(self) -> tuple[tuple[float, float], ...]:
        """``far``, over the long blocks."""
        long_ms = self.long_ms
        return () if long_ms is None else tuple((a / long_ms, b / long_ms) for a, b in self.far)

    @property
    def brought_ms(self) -> tuple[float, ...]:
        """``at_limit_ms`` of the blocks that had a reading."""
        return tuple(ms for ms in self.at_limit_ms if ms is not None)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the logarithm, as measured."""
        return _spread(self.measured_ms)

    @property
    def spread_at_limit(self) -> float | None:
        return _spread(self.brought_ms)

    @property
    def ratio(self) -> float | None:
        """Time at the limit, by the short blocks, over the long blocks'; 1 is unbiased."""
        if not self.brought_ms or self.long_ms is None:
            return None
        return statistics.fmean(self.brought_ms) / self.long_ms


@dataclasses.dataclass(frozen=True)
class Fit:
    """``P ~ f ** exponent``, within each candidate."""

    exponent: float
    correlation: float
    readings: int


@dataclasses.dataclass(frozen=True)
class Analysis:
    alone: tuple[Alone, ...]
    fit: Fit | None
    """None where readings are too few, or all at one clock."""
    agreeing: float | None
    """The exponent by which the short blocks of a candidate agree best. That of ``fit`` is less:
    what a clock is wrong by flattens a slope over it."""

    def median(self, name: str) -> float | None:
        """Over the candidates, of one of their numbers."""
        known = [value for one in self.alone if (value := getattr(one, name)) is not None]
        return numbers.median(known) if known else None


def analysis(data: dict[str, Any]) -> Analysis:
    """Of a record, however far it came."""
    alone = []
    points: list[list[tuple[float, float]]] = []
    for case_id, entry in data["results"]["cases"].items():
        for text, blocks in by_candidate(entry).items():
            alone.append(_alone(case_id, text, blocks, entry["board"]))
            points.append(_log_readings(blocks, entry["board"]["power_limit_w"]))
    return Analysis(tuple(alone), _fit(points), _agreeing(data))


def _agreeing(data: dict[str, Any]) -> float | None:
    """By mean squares, over all candidates."""
    squares: dict[float, float] = {}
    for exponent in (step / 20 for step in range(20, 61)):
        for entry in data["results"]["cases"].values():
            for blocks in by_candidate(entry).values():
                short = [block for block in blocks if block["kind"] == "short"]
                found = [_at_limit_ms(block, entry["board"], exponent) for block in short]
                spread = _spread([ms for ms in found if ms is not None])
                if spread is not None:
                    squares[exponent] = squares.get(exponent, 0.0) + spread**2
    return min(squares, key=squares.__getitem__, default=None)


def by_candidate(entry: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Text -> its blocks, as they ran; the fastest in its last block first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for block in entry["blocks"]:
        found.setdefault(block["text"], []).append(block)
    return dict(sorted(found.items(), key=lambda item: _ended_ms(item[1][-1], _SHORT_SHARE)))


def _alone(
    case_id: str, text: str, blocks: Sequence[dict[str, Any]], board: dict[str, Any]
) -> Alone:
    short = [block for block in blocks if block["kind"] == "short"]
    long = [block for block in blocks if block["kind"] == "long"]
    clocks = [
        clock
        for block in blocks
        for clock in block["clocks_mhz"][_arrived(block) :]
        if clock is not None
    ]
    near = [_at_limit_ms(block, board, EXPONENT) for block in short]
    far = [
        (_ended_ms(block, _SHORT_SHARE), brought_ms)
        for block, near_ms in zip(short, near, strict=True)
        if near_ms is None and (brought_ms := _at_limit_ms(block, board, EXPONENT, FAR)) is not None
    ]
    return Alone(
        case_id,
        text,
        statistics.fmean(clocks) if clocks else None,
        tuple(_ended_ms(block, _SHORT_SHARE) for block in short),
        tuple(near),
        tuple(far),
        statistics.fmean(_ended_ms(block, _LONG_SHARE) for block in long) if long else None,
    )


def _ended_ms(block: dict[str, Any], share: float) -> float:
    times = block["times_ms"]
    return statistics.fmean(times[-max(1, math.floor(share * len(times))) :])


def _arrived(block: dict[str, Any]) -> int:
    return arrived([block["calls"] * ms for ms in block["times_ms"]])


def _at_limit_ms(
    block: dict[str, Any], board: dict[str, Any], exponent: float, within: float = NEAR
) -> float | None:
    found = at_limit_ms(
        block["times_ms"],
        block["clocks_mhz"],
        block["powers_w"],
        GpuState(power_limit_w=board["power_limit_w"], max_clock_mhz=board["max_clock_mhz"]),
        since=_arrived(block),
        exponent=exponent,
        within=within,
    )
    return statistics.fmean(found) if found else None


def _log_readings(
    blocks: Sequence[dict[str, Any]], limit_w: float | None
) -> list[tuple[float, float]]:
    """(log clock, log power) of each reading near the limit."""
    if limit_w is None:
        return []
    return [
        (math.log(clock_mhz), math.log(power_w))
        for block in blocks
        for clock_mhz, power_w in readings(block)
        if abs(power_w / limit_w - 1) <= NEAR
    ]


def readings(block: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """(clock, power) of each reading of the power; its batches' mean clock."""
    batches = zip(block["powers_w"], block["clocks_mhz"], strict=True)
    for power_w, group in itertools.groupby(batches, key=lambda batch: batch[0]):
        clocks = [clock for _, clock in group if clock is not None]
        if power_w is not None and clocks:
            yield statistics.fmean(clocks), power_w


def _fit(points: Sequence[Sequence[tuple[float, float]]]) -> Fit | None:
    """The slope that all candidates share; each has a level of its own."""
    xx = xy = yy = 0.0
    count = 0
    for row in points:
        if len(row) < 2:  # it says nothing of the slope
            continue
        mean_x = statistics.fmean(x for x, _ in row)
        mean_y = statistics.fmean(y for _, y in row)
        xx += math.fsum((x - mean_x) ** 2 for x, _ in row)
        xy += math.fsum((x - mean_x) * (y - mean_y) for x, y in row)
        yy += math.fsum((y - mean_y) ** 2 for _, y in row)
        count += len(row)
    if not xx or not yy:
        return None
    return Fit(xy / xx, xy / math.sqrt(xx * yy), count)


def _spread(times_ms: Sequence[float]) -> float | None:
    if len(times_ms) < 2:
        return None
    return statistics.stdev(math.log(ms) for ms in times_ms)
