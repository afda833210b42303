"""The recordings that the package ships: they load, and every mode plays on them."""

from __future__ import annotations

import dataclasses
from statistics import geometric_mean
from typing import Any

import pytest
from strategies import BUILT_IN_MODES

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases
from cudnn_autotune.audit.model import BURST, SUSTAINED
from cudnn_autotune.audit.summary import measured_regret, truth_of
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers import recordings
from cudnn_autotune.timers.offline.recording import ENVIRONMENT
from cudnn_autotune.timers.offline.replay import ReplayTimer

RUNS = 10


def test_what_is_shipped() -> None:
    assert {"h200_forum", "h200_resnet50_fprop", "h200_vgg_dgrad"} <= set(recordings.names())
    assert list(recordings.names()) == sorted(recordings.names())
    forum = recordings.load("h200_forum").problem
    assert (forum.input_shape, forum.weight_shape) == ((64, 3, 224, 224), (64, 3, 3, 3))


@pytest.mark.parametrize("name", recordings.names())
def test_it_says_what_was_measured_where(name: str) -> None:
    recording = recordings.load(name)
    assert not [field for field in ENVIRONMENT if not recording.environment[field]]
    assert name.split("_")[0] in str(recording.environment["gpu"]).lower()
    assert recording.cold.time_ms
    assert recording.solo
    with recordings.path(name) as path:
        assert path.stat().st_size < 60_000


@pytest.mark.parametrize("name", ["h200", "", "../h200_forum", "h200_forum.json.gz"])
def test_an_unknown_recording(name: str) -> None:
    for call in (recordings.load, recordings.path):
        with pytest.raises(ValueError, match=r"name must be one of h200_forum, .*, got"):
            call(name)


@pytest.mark.parametrize("name", recordings.names())
def test_every_mode_runs_on_it(name: str) -> None:
    recording = recordings.load(name)
    for mode in BUILT_IN_MODES:
        timer = ReplayTimer(recording, 1)
        selection = sampling.get(mode).select(timer.candidates, timer, Limits())
        assert selection is not None, mode
        assert selection.winner.candidate.text in timer.truth("burst"), mode


@pytest.mark.parametrize("name", recordings.names())
@pytest.mark.parametrize(
    ("mode", "truth"), [("race", BURST), ("sustained", SUSTAINED), ("auto", BURST)]
)
def test_the_timing_modes_pick_sensibly(name: str, mode: str, truth: str) -> None:
    """At most 3 % slower than the best on average, each mode by what it looks for."""
    played = offline_cases.RecordedCase.shipped(name)
    judge = truth_of(played.oracle(), truth)
    regrets = []
    for seed in range(RUNS):
        timer = played.open(seed)
        strategy: Any = dataclasses.replace(sampling.get(mode), seed=seed)  # type: ignore[type-var]
        selection = strategy.select(timer.candidates, timer, Limits())
        regret = measured_regret(judge, selection.winner.candidate.text)
        assert regret is not None
        regrets.append(regret)
    assert geometric_mean(regrets) <= 1.03
