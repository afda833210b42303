"""Medians, quartiles, geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import geometric_mean as geometric_mean
from statistics import median as median

import numpy as np


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1) with linear interpolation."""
    return float(np.quantile(values, q))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by order statistics (the binomial as a normal)."""
    half = 0.98 / math.sqrt(len(values))
    return quantile(values, max(0.0, 0.5 - half)), quantile(values, min(1.0, 0.5 + half))


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, quartiles, 5th and 95th percentile, and how many values; :func:`significant`."""
    shares = {"median": 0.5, "q1": 0.25, "q3": 0.75, "p5": 0.05, "p95": 0.95}
    found = {name: significant(quantile(values, q)) for name, q in shares.items()}
    return {**found, "n": len(values)}


def significant(value: float | None, digits: int = 5) -> float | None:
    """`value` rounded to significant digits, to keep records short; None and NaN become None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def all_significant(values: Iterable[float | None]) -> list[float | None]:
    return [significant(v) for v in values]
