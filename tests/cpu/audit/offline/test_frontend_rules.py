"""cuDNN's three sampling techniques, as ``cudnn_frontend::time_sorted_plan`` has them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from cudnn_autotune.audit.offline.stand_ins import frontend_find
from cudnn_autotune.engines.configs import Candidate


def candidate(text: str, rank: int = 0) -> Candidate:
    return Candidate(rank, {}, 0, (), (), text, "A", rank)


A, B, C = (candidate(text, rank) for rank, text in enumerate("ABC"))


class Scripted:
    """Launches that take the given times; None fails."""

    def __init__(self, **times: Iterable[float | None]) -> None:
        self._times = {text: iter(t) for text, t in times.items()}
        self.launched = ""

    def __call__(self, candidate: Candidate) -> tuple[float, bool]:
        self.launched += candidate.text
        time_ms = next(self._times[candidate.text])
        return (0.001, False) if time_ms is None else (time_ms, True)


def test_sample_once_is_one_launch_after_one_warm_up() -> None:
    launch = Scripted(A=[9.0, 2.0], B=[1.0, 3.0])
    found = frontend_find("sample_once", [B, A], 0, launch)
    assert launch.launched == "BBAA"
    assert [(t.candidate.text, t.time_ms, t.samples) for t in found.ranking] == [
        ("A", 2.0, 1),
        ("B", 3.0, 1),
    ]
    assert found.total_samples == 2


@pytest.mark.parametrize("times", [[1.0, 2.0, 9.0], [9.0, 1.0, 2.0], [2.0, 9.0, 1.0]])
def test_median_of_three(times: list[float]) -> None:
    found = frontend_find("median_of_three", [A], 0, Scripted(A=[5.0, *times]))
    assert found.winner.time_ms == 2.0
    assert found.total_samples == 3


@pytest.mark.parametrize(
    ("times", "time_ms", "samples"),
    [
        ([1.0, 0.97], 0.97, 2),  # not 5 % faster: the end, but the sample counts
        ([1.0, 1.2], 1.0, 2),
        ([1.0, 0.9, 0.8, 0.79], 0.79, 4),
        ([0.94**i for i in range(200)], 0.94**99, 100),
    ],
)
def test_till_stable_stops_where_nothing_improves_by_5_percent(
    times: list[float], time_ms: float, samples: int
) -> None:
    found = frontend_find("till_stable", [A], 0, Scripted(A=[5.0, *times]))
    assert (found.winner.time_ms, found.winner.samples) == (time_ms, samples)


def test_till_stable_is_the_best_of_two_at_one_percent_of_jitter() -> None:
    rng = random.Random(0)
    for _ in range(300):
        times = [rng.lognormvariate(0, 0.01) for _ in range(100)]
        found = frontend_find("till_stable", [A], 0, Scripted(A=[1.0, *times]))
        assert found.winner.samples == 2
        assert found.winner.time_ms == min(times[:2])


def test_of_equal_times_the_first_is_kept_and_the_others_vanish() -> None:
    launch = Scripted(A=[1.0, 2.0], B=[1.0, 2.0], C=[1.0, 3.0])
    found = frontend_find("sample_once", [B, A, C], 0, launch)
    assert [t.candidate.text for t in found.ranking] == ["B", "C"]
    assert found.total_samples == 3


def test_a_candidate_that_fails_its_warm_up_is_left_out() -> None:
    found = frontend_find("sample_once", [A, B], 0, Scripted(A=[None], B=[1.0, 2.0]))
    assert [t.candidate.text for t in found.ranking] == ["B"]


def test_the_limit_counts_candidates_that_ran() -> None:
    launch = Scripted(A=[None], B=[1.0, 2.0], C=[1.0, 1.0])
    found = frontend_find("sample_once", [A, B, C], 1, launch)
    assert [t.candidate.text for t in found.ranking] == ["B"]
