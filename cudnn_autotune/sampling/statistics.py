"""The statistics of a race: differences between candidates in interleaved rounds, and their errors.

The model of a sample is ``log(time of candidate i in round r) = mu_i + rho_r + noise``. Candidates
that take turns share a round's disturbance ``rho_r`` (clock, temperature, another tenant), which
therefore cancels. It is fitted by Tukey's median polish (Exploratory Data Analysis, 1977), which is
robust to a few outliers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Standard deviation over median absolute deviation, for normal noise.
_MAD_TO_SIGMA = 1.4826
# Standard error of a median over that of a mean, for normal noise: the root of pi / 2.
_MEDIAN_COST = 1.25
# The 90 % quantile of |noise| is 1.645 standard deviations. It shows fat tails, and a median does
# not.
_TAIL = 0.9
_TAIL_TO_SIGMA = 1 / 1.645
# A residual this many sigmas away is a disturbance, not noise.
_DISTURBED = 6.0


def medians(rows: Floats) -> Floats:
    """Returns ``np.median`` of finite numbers along the last axis, without its checks. These take
    most of the time on small tables, and while ``online`` judges, callers wait for Python's
    lock."""
    half, is_odd = divmod(rows.shape[-1], 2)
    parted = np.partition(rows, half if is_odd else (half - 1, half))
    middle = parted[..., half]
    return middle if is_odd else 0.5 * (parted[..., half - 1] + middle)


def quantile(ordered: Floats, share: float) -> float:
    """Returns ``np.quantile`` of sorted finite numbers, without its checks."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


def expected_gain(behind: float, error: float) -> float:
    """Returns the expectation of ``max(0, -x)`` for a normal ``x`` of mean ``behind``: the gain of
    one more look at a candidate that seems to be slower by ``behind``.

    It is the expected improvement of Jones, Schonlau & Welch (J. Global Optimization 13, 1998).

    Args:
        error: the standard error of ``behind``.
    """
    if error <= 0:
        return max(0.0, -behind)
    z = behind / error
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return error * density - behind * 0.5 * math.erfc(z / math.sqrt(2))


@dataclass(frozen=True)
class Fit:
    """A median polish of rounds by candidates."""

    log_time: Floats
    """Log time of each candidate."""
    residuals: Floats
    """The residuals of the log times, rounds by candidates."""


def median_polish(log_times: Floats, iterations: int = 8) -> Fit:
    """Fits ``mu_i + rho_r``, with a median ``rho`` of 0, to log times of rounds by candidates."""
    residuals = log_times.copy()
    for _ in range(iterations):
        step = medians(residuals.T)
        residuals -= step
        step_rho = medians(residuals)
        residuals -= step_rho[:, None]
        if np.abs(step).max() < 1e-9 and np.abs(step_rho).max() < 1e-9:
            break
    # The fit is mu_i + rho_r, whose median over the rounds is mu_i.
    return Fit(medians((log_times - residuals).T), residuals)


@dataclass(frozen=True)
class Comparison:
    """The comparison of candidates by some rounds."""

    log_time: Floats
    """Log time of each candidate, averaged over the cache states."""
    half_width: float
    """Half width of the confidence interval of the difference of any two candidates."""
    error: float
    """Standard error of the difference of any two candidates."""
    sigma: float
    """Standard deviation of one sample's log time."""
    disturbed: int
    """The number of disturbed samples (outliers)."""
    at_best: Floats
    """Log time of each candidate in its best round, less the disturbance of that round."""

    @property
    def best(self) -> int:
        return int(np.argmin(self.log_time))

    @property
    def is_out(self) -> NDArray[np.bool_]:
        """For each candidate, whether it cannot be the fastest, even by its best round. So a
        candidate with occasional disturbances stays."""
        lowest = np.minimum(self.log_time, self.at_best)
        return np.asarray(lowest - self.log_time[self.best] > self.half_width)


def compare(
    groups: Sequence[Floats],
    *,
    delta: float,
    least_sigma: float,
    prior_sigma: float,
    prior_freedom: int,
) -> Comparison:
    """Compares candidates by rounds. The rounds of each cache state are fitted on their own.

    If a cache state has only one round, all are fitted together: one round alone has no residuals.

    The half width is ``1.25 s sqrt(2 / R) sqrt(2 ln(2 N log2(R + 1) / delta))``: a normal tail for
    the difference of two medians. A union bound covers the N candidates and a race's looks (the
    scheme of Maron & Moore, Hoeffding Races, NIPS 1993).

    Args:
        groups: log times, rounds by candidates, one array for each cache state.
        delta: 1 - confidence.
        least_sigma: lower bound of the noise.
        prior_sigma: its lower bound while the residuals have fewer than ``prior_freedom`` degrees
            of freedom.
    """
    groups = [group for group in groups if len(group)]
    if min(map(len, groups)) < 2:
        groups = [np.concatenate(groups)]
    fits = [median_polish(group) for group in groups]
    count = groups[0].shape[1]
    rounds = sum(len(group) for group in groups)
    freedom = sum((len(group) - 1) * (count - 1) for group in groups)
    residuals = np.concatenate([fit.residuals.ravel() for fit in fits])
    sigma = 0.0
    if freedom > 0:
        spread = np.sort(np.abs(residuals))
        sigma = _MAD_TO_SIGMA * quantile(spread, 0.5)
        sigma = max(sigma, _TAIL_TO_SIGMA * quantile(spread, _TAIL))
        sigma *= math.sqrt(rounds * count / freedom)
    disturbed = int(np.sum(np.abs(residuals) > _DISTURBED * max(sigma, least_sigma)))
    sigma = max(sigma, least_sigma, prior_sigma if freedom < prior_freedom else 0.0)
    looks = math.log2(rounds + 1)
    tail = math.sqrt(2 * math.log(2 * count * looks / delta))
    error = _MEDIAN_COST * sigma * math.sqrt(2 / rounds)
    log_time = np.mean([fit.log_time for fit in fits], axis=0)
    at_best = log_time + np.min([np.min(fit.residuals, axis=0) for fit in fits], axis=0)
    return Comparison(log_time, error * tail, error, sigma, disturbed, at_best)
