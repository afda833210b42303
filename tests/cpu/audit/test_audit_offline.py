"""Audit: modes on recordings and, where an exact truth is wanted, on simulations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import simulation
from support.simulation.audit import SimulatedCase
from support.tuning.recorder import record as record_samples
from support.tuning.recorder import save

from cudnn_autotune import ConvProblem, sampling
from cudnn_autotune.audit import offline_cases, report
from cudnn_autotune.audit.model import BURST, BURST_COLD, STEADY, SUSTAINED, Pick, Record
from cudnn_autotune.audit.summary import summarize, truth_of
from cudnn_autotune.sampling import Candidates, Evidence, Limits, Measurement, Selection, Timer

PROBLEM = ConvProblem(
    "dgrad",
    (128, 512, 28, 28),
    (512, 512, 3, 3),
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)


def audited(names: list[str], runs: dict[str, int], seed: int = 0, **more: float) -> Record:
    found = Record("replay", settings={}, environment={})
    every = [SimulatedCase(name) for name in names]
    offline_cases.audit(found, every, runs, limits=Limits(), seed=seed, **more)
    return found


def test_regrets_are_against_the_exact_truth() -> None:
    found = audited(["forum-l4"], {"sample_once": 20, "sustained": 4})
    assert found.complete
    result = summarize(found)
    once, sustained = result["sample_once"], result["sustained"]
    assert sum(once.picked.values()) == 20
    assert once.picked["128x128"] >= 15, "the coolest engine wins a short race"
    assert once.regret.worst == pytest.approx(5.77 / 3.62, rel=0.01)
    assert sustained.picked == {"128x64": 4}
    assert sustained.regret.worst == 1.0
    # In bursts it is the other way round.
    assert sustained.regrets[BURST].mean == pytest.approx(3.61 / 3.50, rel=0.001)
    assert set(once.regrets) >= {STEADY, SUSTAINED, BURST, BURST_COLD}


def test_equal_seeds_give_equal_audits_and_runs_differ() -> None:
    one, same = (audited(["aa"], {"sample_once": 6}) for _ in range(2))
    assert one.picks == same.picks
    assert one.picks != audited(["aa"], {"sample_once": 6}, seed=1).picks
    assert len({by_case["aa"].time_ms for by_case in one.picks["sample_once"].values()}) == 6


def test_a_time_limit_cuts_runs_and_not_modes() -> None:
    found = audited(["quiet"], {"heuristic": 500, "sample_once": 500}, time_limit_s=0.2)
    assert not found.complete
    counts = [len(runs) for runs in found.picks.values()]
    assert max(counts) - min(counts) <= 1
    assert 0 < max(counts) < 500
    assert summarize(found)["heuristic"].regret is not None


class Failing:
    name = "test_audit_failing"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        timer.runnable(candidates.all())
        raise RuntimeError("CUDA error: device lost")


class Nothing:
    name = "test_audit_nothing"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        return None


@pytest.fixture(scope="module")
def modes() -> Iterator[tuple[str, str]]:
    for strategy in (Failing(), Nothing()):
        sampling.register(strategy)
    yield Failing.name, Nothing.name
    # There is no way to take a mode back, and other tests compare the list of modes.
    for strategy in (Failing.name, Nothing.name):
        del sampling._strategies[strategy], sampling._places[strategy]


def test_a_mode_that_fails_is_told_and_the_others_go_on(modes: tuple[str, str]) -> None:
    found = audited(["quiet"], dict.fromkeys((*modes, "heuristic"), 1))
    result = summarize(found)
    assert result[modes[0]].unavailable == "RuntimeError: CUDA error: device lost"
    assert result[modes[1]].unavailable == "no candidate runs"
    assert result["heuristic"].regret is not None


def test_what_a_pick_keeps_of_the_evidence() -> None:
    timer = simulation.preset("quiet")
    first, second = timer.candidates.all()[:2]
    evidence = Evidence(rule="fastest", regret_bound=0.01, confidence=0.95, gpu_ms=7.0, disturbed=1)
    ranking = (
        Measurement(first, 0.5, 3, sustained_ms=0.6),
        Measurement(second, 0.7, 3, sustained_ms=0.8),
    )
    picked = Pick.of(Selection(ranking, 6, evidence), 12.0)
    assert picked == Pick(
        text=first.text,
        tuning_ms=12.0,
        time_ms=0.5,
        regret_bound=0.01,
        bound_truth=SUSTAINED,
        rule="fastest",
    )
    # A leader with a sustained run but no contenders was chosen by the race.
    probed = Pick.of(Selection((ranking[0], Measurement(second, 0.7, 3)), 6, evidence), 12.0)
    assert probed.bound_truth == BURST


def test_a_record_says_what_was_missed() -> None:
    """A race judges by bursts alone."""
    found = audited(["h200-capped"], {"race": 2, "sustained": 2})
    found.settings["reference"] = "race"
    (truth,) = (truth_of(oracle, STEADY) for oracle in found.oracle.values())
    (table,) = (t for t in report.tables(found) if "missed" in t.title)
    assert table.title == "What race missed by more than 1 %"
    ((case, result, runs, slower),) = table.rows
    assert (case, runs) == ("h200-capped", "2 of 2")
    assert f"instead of {truth.best}" in result
    assert float(slower.removesuffix(" %")) > 1
    found.settings["reference"] = "sustained"
    assert not any("missed" in t.title for t in report.tables(found))


# recordings


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timer = simulation.preset("h200-capped", 1)
    path = tmp_path_factory.mktemp("recordings") / "capped.json.gz"
    environment = {"gpu": timer.gpu.name}
    made = record_samples(timer, timer.candidates, PROBLEM, solo=3)
    save(replace(made, environment=made.environment | environment), path)
    return path


def test_what_was_not_recorded_alone_is_estimated_and_never_the_best(recording: Path) -> None:
    case = offline_cases.RecordedCase(recording)
    traced = {trace.text for trace in case.recording.solo}
    oracle = case.oracle()
    truth = oracle.truths[SUSTAINED]
    assert truth.best in traced
    assert set(truth.times_ms) == set(oracle.truths[BURST_COLD].times_ms) > traced
    assert "follow from their bursts" in oracle.remarks[0]
    assert oracle.truths[BURST_COLD].errors, "paired over the recorded rounds"


def test_what_a_mode_asks_for_in_vain_is_said(tmp_path: Path) -> None:
    timer = simulation.preset("forum-l4")
    path = tmp_path / "no-solo.json"
    save(record_samples(timer, timer.candidates, PROBLEM, solo=0, rounds=5), path)
    found = Record("replay", settings={}, environment={})
    offline_cases.audit(
        found, [offline_cases.RecordedCase(path)], {"heuristic": 1, "sustained": 1}, limits=Limits()
    )
    assert not found.picks["heuristic"]["1"]["no-solo"].lacking
    assert found.picks["sustained"]["1"]["no-solo"].lacking
    table = next(t for t in report.tables(found) if t.title == "What the recording lacks")
    assert [row[1] for row in table.rows] == ["sustained"]
    assert SUSTAINED not in found.oracle["no-solo"].truths
