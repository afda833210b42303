"""What rounds say: the fit against closed forms, its intervals against repeated experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cudnn_autotune.sampling.statistics import (
    Comparison,
    Floats,
    compare,
    median_polish,
)

RULES: dict[str, Any] = {
    "delta": 0.05,
    "least_sigma": 0.0015,
    "prior_sigma": 0.01,
    "prior_freedom": 12,
}


def judge(*groups: Floats, **changes: Any) -> Comparison:
    return compare(groups, **{**RULES, **changes})


def rounds_of(
    mu: Sequence[float], rounds: int, sigma: float, rng: np.random.Generator, shared: float = 0.0
) -> Floats:
    """Normal log times; ``shared``: the deviation of what disturbs a whole round."""
    noise = rng.normal(0, sigma, (rounds, len(mu))) if sigma else 0.0
    drift = rng.normal(0, shared, (rounds, 1)) if shared else 0.0
    return np.asarray(mu) + noise + drift + np.zeros((rounds, len(mu)))


# Median polish


tables = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 7), st.integers(1, 6)),
    elements=st.floats(-5, 5, allow_nan=False, width=32),
)


@given(table=tables, scale=st.floats(-3, 3))
def test_fit_and_residuals_add_up(table: Floats, scale: float) -> None:
    before = table.copy()
    fit = median_polish(table)
    assert (table == before).all(), "the input was changed"
    rho = table - fit.residuals - fit.log_time
    assert rho == pytest.approx(np.repeat(rho[:, :1], table.shape[1], axis=1), abs=1e-9)
    assert float(np.median(rho[:, 0])) == pytest.approx(0, abs=1e-9)
    # What is common to all samples goes into mu.
    moved = median_polish(table + scale)
    assert moved.log_time == pytest.approx(fit.log_time + scale, abs=1e-6)


@given(table=tables, data=st.data())
def test_what_a_round_has_in_common_cancels(table: Floats, data: st.DataObject) -> None:
    """However large it is, the candidates' distances do not see it."""
    rounds = len(table)
    rho = np.array(data.draw(st.lists(st.floats(-9, 9), min_size=rounds, max_size=rounds)))
    additive = table[0] + rho[:, None]
    fit = median_polish(additive)
    assert fit.log_time - fit.log_time[0] == pytest.approx(table[0] - table[0, 0], abs=1e-9)
    assert np.abs(fit.residuals).max() < 1e-9


def polished_with_numpy(log_times: Floats, iterations: int = 8) -> tuple[Floats, Floats]:
    """(mu, residuals): the definition, both effects added up as they are taken off."""
    residuals = log_times.copy()
    mu, rho = np.zeros(log_times.shape[1]), np.zeros(log_times.shape[0])
    for _ in range(iterations):
        step = np.median(residuals, axis=0)
        residuals -= step
        mu += step
        step_rho = np.median(residuals, axis=1)
        residuals -= step_rho[:, None]
        rho += step_rho
        if np.abs(step).max() < 1e-9 and np.abs(step_rho).max() < 1e-9:
            break
    return mu + float(np.median(rho)), residuals


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_quick_polish_is_the_plain_one(rounds: int, count: int) -> None:
    rng = np.random.default_rng(rounds * 100 + count)
    for table in (
        rounds_of(np.linspace(0, 0.5, count).tolist(), rounds, 0.02, rng, shared=0.2),
        rng.integers(0, 4, (rounds, count)).astype(float),  # with equal numbers
    ):
        fit = median_polish(table)
        mu, residuals = polished_with_numpy(table)
        assert np.abs(fit.log_time - mu).max() < 1e-12
        assert np.abs(fit.residuals - residuals).max() < 1e-12


def test_spoilt_samples_do_not_move_it() -> None:
    """Three times as long in 8 of 44 samples: the mean would be off by 20 %."""
    rng = np.random.default_rng(0)
    clean = rounds_of([0.0, 0.02, 0.05, 0.3], 11, 0.002, rng, shared=0.1)
    spoilt = clean.copy()
    for candidate in range(4):
        for row in rng.choice(11, 2, replace=False):
            spoilt[row, candidate] += math.log(3)
    before, after = median_polish(clean), median_polish(spoilt)
    assert after.log_time - after.log_time[0] == pytest.approx(
        before.log_time - before.log_time[0], abs=0.005
    )
    assert judge(clean).best == judge(spoilt).best == 0


# Comparison


def test_the_half_width_is_the_documented_formula() -> None:
    """With noise below the floor: the floor's formula, to the digit."""
    for rounds, count in ((6, 2), (20, 5), (40, 12)):
        log_times = np.zeros((rounds, count)) + np.arange(count)
        expected = (
            1.25
            * RULES["least_sigma"]
            * math.sqrt(2 / rounds)
            * math.sqrt(2 * math.log(2 * count * math.log2(rounds + 1) / 0.05))
        )
        found = judge(log_times, prior_freedom=0)
        assert found.half_width == pytest.approx(expected)
        assert found.sigma == RULES["least_sigma"]


@pytest.mark.parametrize("sigma", [0.003, 0.02])
def test_sigma_is_that_of_a_sample(sigma: float) -> None:
    """Whatever all samples of a round have in common, and whatever the candidates' times are."""
    rng = np.random.default_rng(1)
    found = [
        judge(rounds_of([0.0, 0.3, -2.0, 0.1], 24, sigma, rng, shared=0.2)).sigma for _ in range(50)
    ]
    assert np.mean(found) == pytest.approx(sigma, rel=0.25)
    assert np.mean(found) > 0.95 * sigma, "it must not be an underestimate"


@pytest.mark.parametrize("sigma", [0.005, 0.03])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("rounds", [4, 8, 24])
def test_the_interval_covers_in_repeated_experiments(rounds: int, count: int, sigma: float) -> None:
    """All differences at once, as a race looks at them; drift of the whole round comes on top."""
    rng = np.random.default_rng(4)
    mu = np.linspace(0, 0.1, count)
    experiments = 150
    covered = 0
    for _ in range(experiments):
        half = rounds // 2
        groups = [rounds_of(mu, half, sigma, rng, 0.05), rounds_of(mu, half, sigma, rng, 0.05)]
        found = judge(*groups)
        wrong = np.abs((found.log_time - found.log_time[0]) - (mu - mu[0]))
        covered += bool((wrong <= found.half_width).all())
    assert covered >= 0.95 * experiments


@pytest.mark.parametrize("sigma", [0.004, 0.02])
def test_the_fastest_is_never_out_in_a_whole_race(sigma: float) -> None:
    """The union bound over the looks: judged after every round, and never wrongly out."""
    rng = np.random.default_rng(5)
    mu = np.array([0.0, 0.004, 0.01, 0.02, 0.05, 0.3])
    races, wrong = 80, 0
    for _ in range(races):
        data = rounds_of(mu, 24, sigma, rng, 0.02)
        for rounds in range(2, 25, 2):
            found = judge(data[:rounds:2], data[1:rounds:2])
            if found.log_time[0] - found.log_time.min() > found.half_width:
                wrong += 1
                break
    assert wrong <= 0.05 * races


def test_cache_states_are_fitted_on_their_own_and_averaged() -> None:
    """A candidate that the cache helps more than others is not thereby noisy."""
    cold = np.zeros((6, 3)) + np.array([0.0, 0.1, 0.2])
    hot = np.zeros((6, 3)) + np.array([0.0, -0.2, 0.1])
    found = judge(cold, hot, prior_freedom=0)
    assert found.log_time == pytest.approx([0.0, -0.05, 0.15])
    assert found.sigma == RULES["least_sigma"]
    assert found.best == 1
    # Groups without rounds do not count.
    assert judge(cold, cold[:0]).log_time == pytest.approx(judge(cold).log_time)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("spoilt", ["cold", "hot"])
def test_a_candidate_spoilt_in_one_round_has_another_best_one(spoilt: str, rounds: int) -> None:
    """From the first look on: else another process that comes by drops the fastest for good."""
    rng = np.random.default_rng(6)
    mu = [0.0, 0.03, 0.06, 0.1]
    cold, hot = (rounds_of(mu, rounds, 0.002, rng, 0.05) for _ in range(2))
    (cold if spoilt == "cold" else hot)[0, 0] += math.log(2)
    found = judge(cold, hot)
    assert found.at_best[0] - found.log_time.min() <= found.half_width
    # Who is slow in every round has no such excuse.
    assert found.at_best[3] - found.log_time.min() > 0.04
