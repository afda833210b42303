"""The times of candidates that took turns, and the errors of their distances from the fastest."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import Truth
from cudnn_autotune.sampling.statistics import median_polish

# For normal noise, the standard error of a median is 1.2533 times that of a mean, and 1.4826 times
# the median absolute deviation is the standard deviation.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
_ITERATIONS = 20  # median polish mostly converges in a few


def relative_error(ratios: npt.NDArray[np.float64]) -> float:
    """Returns the relative standard error of the median of ``ratios``, from their deviations."""
    centre = float(np.median(ratios))
    spread = float(np.median(np.abs(ratios - centre)))
    return _ERROR_OF_MEDIAN * spread / math.sqrt(len(ratios)) / centre


def of_rounds(times: dict[str, list[float]]) -> Truth:
    """Returns times and errors of complete rounds, by median polish of the logarithms."""
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
    """Returns geometric means of two or more runs of each candidate, and their errors.

    The errors follow from how far the runs of one candidate lie apart, over all candidates: a few
    runs say little about their own noise.
    """
    logs = {text: np.log(times) for text, times in blocks.items()}
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
