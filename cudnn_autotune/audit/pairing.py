"""Times of candidates that took turns, and their errors.

The logarithm of a time is a candidate's effect plus a round's effect plus noise; errors are those
of a candidate's distance from the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import Truth
from cudnn_autotune.sampling.statistics import median_polish

# 1.2533 is the standard error of a median over that of a mean, 1.4826 * MAD a robust sigma; both
# for normal noise.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
_ITERATIONS = 20  # it mostly converges in a few
# Power grows with about the square of the clock. What is known of it beforehand counts as four
# blocks whose powers differ by a percent.
_PRIOR_SLOPE = -0.5
_PRIOR_SQUARES = 4 * 0.01**2
# Further from the others' power, relative, it was not the limit that held a block.
_NEAR_LIMIT = 0.1


def relative_error(ratios: npt.NDArray[np.float64]) -> float:
    """Of the median of ``ratios``: its standard error, from the median absolute deviation."""
    centre = float(np.median(ratios))
    spread = float(np.median(np.abs(ratios - centre)))
    return _ERROR_OF_MEDIAN * spread / math.sqrt(len(ratios)) / centre


def of_rounds(times: dict[str, list[float]]) -> Truth:
    """Times and errors from complete rounds, by median polish of their logarithms."""
    texts = list(times)
    logs = np.log(np.array([times[text] for text in texts]))
    level = median_polish(logs.T, iterations=_ITERATIONS).mu
    best = int(np.argmin(level))
    return Truth(
        {text: float(np.exp(value)) for text, value in zip(texts, level, strict=True)},
        {
            text: relative_error(np.exp(logs[i] - logs[best]))
            for i, text in enumerate(texts)
            if i != best
        },
    )


@dataclass(frozen=True)
class SteadyTime:
    """What a block says of a candidate alone."""

    time_ms: float
    clock_mhz: float | None
    power_w: float | None = None
    """Mean of the readings meanwhile, where the power limit held the clock."""
    sensitivity: float = 1.0
    """As ``board_power.clock_sensitivity``."""


def at_one_power(blocks: Mapping[str, Sequence[SteadyTime]]) -> dict[str, list[float]]:
    """Times of blocks; of those that the power limit held, what they would be at the power that it
    lets them have in the mean.

    By the slope of log(time) over log(power) that the blocks of one candidate show among
    themselves, the less the less its time depends on the clock: what the board charged one block
    and paid to another. Blocks whose power is far from that of the others stay as they are, and so
    do those whose power is not known; but where two blocks of a candidate or more were brought to
    that power, such as were not are left out.
    """
    held = {
        text: [math.log(block.power_w or math.inf) for block in some]
        for text, some in blocks.items()
    }
    known = [log for logs in held.values() for log in logs if log < math.inf]
    if not known:
        return {text: [block.time_ms for block in some] for text, some in blocks.items()}
    middle = float(np.median(known))
    mean = float(np.mean([log for log in known if abs(log - middle) <= _NEAR_LIMIT]))
    across, along = _PRIOR_SLOPE * _PRIOR_SQUARES, _PRIOR_SQUARES
    for text, some in blocks.items():
        rows = [
            (block.sensitivity * (log - mean), math.log(block.time_ms))
            for block, log in zip(some, held[text], strict=True)
            if abs(log - middle) <= _NEAR_LIMIT
        ]
        if rows:
            own = np.array(rows)
            x, y = (own - own.mean(axis=0)).T
            across += float(x @ y)
            along += float(x @ x)
    slope = min(0.0, max(2 * _PRIOR_SLOPE, across / along))

    found = {}
    for text, some in blocks.items():
        pairs = list(zip(some, held[text], strict=True))
        brought = [
            block.time_ms * math.exp(slope * block.sensitivity * (mean - log))
            for block, log in pairs
            if abs(log - middle) <= _NEAR_LIMIT
        ]
        as_they_are = [block.time_ms for block, log in pairs if abs(log - middle) > _NEAR_LIMIT]
        found[text] = brought if len(brought) > 1 else [*brought, *as_they_are]
    return found


def of_blocks(blocks: dict[str, list[float]]) -> Truth:
    """From two or more blocks of each candidate: their geometric mean; errors of the distance from
    the fastest, from how far the blocks of one candidate lie apart."""
    logs = {text: np.log(times) for text, times in blocks.items()}
    # A few blocks say little about their own noise; all of them together say more.
    freedom = sum(len(values) - 1 for values in logs.values())
    squares = sum(float(np.var(values)) * len(values) for values in logs.values())
    sigma = math.sqrt(squares / freedom)
    times = {text: math.exp(float(np.mean(values))) for text, values in logs.items()}
    best = min(times, key=times.__getitem__)
    return Truth(
        times,
        {
            text: sigma * math.sqrt(1 / len(logs[text]) + 1 / len(logs[best]))
            for text in times
            if text != best
        },
    )
