"""Ranks share and agree: real processes, gloo's store, engines timed on simulated GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.conv.problems import make
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ranks

from cudnn_autotune.distributed.agreement import best
from cudnn_autotune.engines.problem_json import problem_to_json

RUNS = 5
# Noise makes ranks choose differently there: (mode, simulated GPU).
DISAGREEABLE = [("sample_once", "co-tenant"), ("median_of_three", "aa")]


@pytest.fixture(autouse=True)
def nothing_left(four: Ranks) -> Iterator[None]:
    """Every call that ends well leaves no key in the store, and no thread."""
    yield
    assert four.stored() == []
    assert four.values(cases.threads) == [[], [], [], []]


@pytest.mark.parametrize(("mode", "scene"), DISAGREEABLE)
def test_every_rank_has_the_same_choices_in_every_run(four: Ranks, mode: str, scene: str) -> None:
    disputed = 0
    for run in range(RUNS):
        disputed += len(set(map(tuple, four.values(cases.alone, mode, scene, 6, 4 * run)))) > 1
        results = four.values(cases.shared, mode, scene, 6, 4 * run)
        lists = [decisions for _, decisions in results]
        assert len(lists[0]) == 6
        assert lists[1:] == lists[:1] * 3
    assert disputed > RUNS / 4  # they had to agree


def test_each_problem_is_tuned_once_and_comes_back_in_order(four: Ranks) -> None:
    results = four.values(cases.shared, "race", "quiet", 30, 0)
    counts = Counter(problem for tuned, _ in results for problem in tuned)
    assert counts == Counter(cases.problems(30))
    assert all(tuned for tuned, _ in results)
    asked = [problem_to_json(problem) for problem in cases.problems(30)]
    assert [decision["problem"] for decision in results[0][1]] == asked


def test_the_largest_problems_go_first(four: Ranks) -> None:
    results = four.values(cases.shared, "race", "quiet", 30, 0)
    for tuned, _ in results:
        sizes = [problem.input_shape[0] * problem.input_shape[2] for problem in tuned]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_ranks_than_problems(four: Ranks, count: int) -> None:
    results = four.values(cases.shared, "race", "quiet", count, 0)
    assert sum(len(tuned) for tuned, _ in results) == count
    assert [len(decisions) for _, decisions in results] == [count] * 4


def test_unequal_gpus_share_among_their_equals(four: Ranks) -> None:
    results = four.values(cases.shared_between_unequal, 12)
    for first, second, count in ((0, 2, 12), (1, 3, 13)):
        assert Counter(results[first][0] + results[second][0]) == Counter(cases.problems(count))
        assert results[first][1] == results[second][1]
        assert len(results[first][1]) == count
    assert results[0][1] != results[1][1][:12]


def test_a_subset_of_the_ranks(four: Ranks) -> None:
    results = four.values(cases.shared, "race", "aa", 12, 0, (1, 3))
    assert Counter(results[1][0] + results[3][0]) == Counter(cases.problems(12))
    assert results[1][1] == results[3][1]
    assert results[0] == results[2] == ([], [])


def test_a_process_that_is_not_in_the_group(four: Ranks) -> None:
    done = four.run(cases.not_a_member)
    assert [ran.error for ran in done[:2]] == [None, None]
    for rank in (2, 3):
        assert isinstance(done[rank].error, ValueError)
        assert f"group must be one that this process (rank {rank}) is" in str(done[rank].error)


@pytest.mark.parametrize(("mode", "scene"), DISAGREEABLE)
def test_what_was_measured_best_wins(four: Ranks, mode: str, scene: str) -> None:
    results = four.values(cases.settled, mode, scene, 8, 3)
    agreed = results[0][1]
    assert [decisions for _, decisions in results] == [agreed] * 4
    assert [d["problem"] for d in agreed] == [problem_to_json(p) for p in cases.problems(8)]
    for number, decision in enumerate(agreed):
        decisions = [own[number - rank] for rank, (own, _) in enumerate(results) if rank <= number]
        most = max(decision["selection"]["total_samples"] for decision in decisions)
        # The first of those: the lowest rank.
        assert decision == next(r for r in decisions if r["selection"]["total_samples"] == most)
    # They did not agree before, nor did one rank simply prevail.
    assert any(own != agreed[rank:] for rank, (own, _) in enumerate(results))


def test_a_model_leaves_every_rank_with_the_same_choices(four: Ranks) -> None:
    results = four.values(cases.model_tuned, [9] * 4)
    assert results[0]["error"] is None
    assert results[1:] == results[:1] * 3
    assert [origin for origin, _ in results[0]["known"]] == ["agreed"] * 9
    assert [problem for problem, _ in results[0]["choices"]] == cases.problems(9)


def test_a_rank_without_a_convolution_helps_the_others(four: Ranks) -> None:
    """Rank 0 is a stage of a pipeline with nothing to tune of its own."""
    results = four.values(cases.model_tuned, [0, 9, 4, 0])
    assert results[0]["error"] is None
    assert results[1:] == results[:1] * 3
    assert [problem for problem, _ in results[0]["choices"]] == cases.problems(9)


def test_what_all_have_pinned_is_not_tuned(four: Ranks) -> None:
    results = four.values(cases.model_tuned, [3] * 4, None, "race", range(4))
    assert results[0]["error"] is None
    assert results[1:] == results[:1] * 3
    assert [problem for problem, _ in results[0]["choices"]] == cases.problems(3)[1:]


def test_agree_installs_the_same_on_all(four: Ranks) -> None:
    results = four.values(cases.agreed, 6)
    assert len({tuple(result.pop("own")) for result in results}) > 1
    assert results[0]["error"] is None
    assert results[1:] == results[:1] * 3
    assert [origin for origin, _ in results[0]["known"]] == ["agreed"] * 6
    # When they were measured, not when they were agreed upon.
    times = {decision["provenance"]["time"] for decision in results[0]["decisions"]}
    assert times <= {f"2026-01-{day:02}T12:00:00.000000Z" for day in range(1, 5)}


@pytest.mark.parametrize("tighter", [{"deterministic": True}, {"workspace_limit": 2**20}])
def test_looser_constraints_win_over_more_samples(tighter: dict[str, object]) -> None:
    problem = make("resnet_fp16_nhwc")
    tune_one = cases.tuner("race", "aa", 0)
    loose = tune_one(problem)
    tight = replace(loose, selection=replace(loose.selection, total_samples=10**6))
    if "deterministic" in tighter:
        tight = replace(tight, problem=make("resnet_fp16_nhwc", deterministic=True))
    else:
        tight = replace(tight, policy=replace(tight.policy, workspace=2**20))
    assert tight.key == loose.key
    assert best([tight, loose]) == best([loose, tight]) == {loose.key: loose}
