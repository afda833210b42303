"""Times of candidates that took turns, and their errors.

The logarithm of a time is a candidate's effect plus a round's effect plus noise; errors are those
of a candidate's distance from the fastest.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import Truth
from cudnn_autotune.sampling.statistics import median_polish

# 1.2533 is the standard error of a median over that of a mean, 1.4826 * MAD a robust sigma; both
# for normal noise.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
_ITERATIONS = 20  # it mostly converges in a few


def relative_error(ratios: npt.NDArray[np.float64]) -> float:
    """Of the median of ``ratios``: its standard error, from the median absolute deviation."""
    centre = float(np.median(ratios))
    spread = float(np.median(np.abs(ratios - centre)))
    return _ERROR_OF_MEDIAN * spread / math.sqrt(len(ratios)) / centre


def of_rounds(times: dict[str, list[float]]) -> Truth:
    """Times and errors from complete rounds, by median polish of their logarithms."""
    texts = list(times)
    logs = np.log(np.array([times[text] for text in texts]))
    level = median_polish(logs.T, iterations=_ITERATIONS).log_time
    best = int(np.argmin(level))
    return Truth(
        {text: float(np.exp(value)) for text, value in zip(texts, level, strict=True)},
        {
            text: relative_error(np.exp(logs[i] - logs[best]))
            for i, text in enumerate(texts)
            if i != best
        },
    )


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
