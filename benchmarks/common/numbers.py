"""Medians, quartiles, geometric means: small samples, standard library only."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1) with linear interpolation, as numpy's default."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("quantile of no values")
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median."""
    source = random.Random(seed)
    n = len(values)
    medians = sorted(statistics.median(source.choices(values, k=n)) for _ in range(draws))
    tail = (1 - level) / 2
    return quantile(medians, tail), quantile(medians, 1 - tail)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, 5th and 95th percentile, and how many values."""
    return {
        "median": median(values),
        "q1": quantile(values, 0.25),
        "q3": quantile(values, 0.75),
        "p5": quantile(values, 0.05),
        "p95": quantile(values, 0.95),
        "n": len(values),
    }


def significant(value: float | None, digits: int = 5) -> float | None:
    """`value` rounded to significant digits, to keep records short; None and NaN become None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def all_significant(values: Iterable[float | None], digits: int = 5) -> list[float | None]:
    return [significant(v, digits) for v in values]
