"""Recordings: what ``record`` measures and keeps, the file, and every way in which one is bad."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import math
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import simulation
from support.simulation import (
    PROBLEM,
    SimulatedEngine,
    SimulatedTimer,
    candidate,
    engine,
    timer_of,
)
from support.tuning.recorder import record, save
from support.tuning.strategies import AT_ONCE

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, recordings
from cudnn_autotune.audit.model import BURST, SUSTAINED
from cudnn_autotune.audit.offline.recording import ENVIRONMENT, Recording
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.audit.summary import measured_regret, truth_of
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Batch


def recorded(timer: SimulatedTimer, **options: Any) -> Recording:
    return record(timer, timer.candidates, PROBLEM, **options)


@pytest.fixture(scope="module")
def small() -> Recording:
    return recorded(simulation.preset("quiet", 1), rounds=4, solo=2, solo_ms=300.0)


@pytest.fixture(scope="module")
def tree(small: Recording, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("recording") / "r.json"
    save(small, path)
    return json.loads(path.read_text())


# What is measured


@pytest.mark.parametrize("name", simulation.preset_names())
def test_every_preset_can_be_recorded(name: str) -> None:
    timer = simulation.preset(name, 1)
    recording = recorded(timer)

    assert set(ENVIRONMENT) <= set(recording.environment)
    assert [r.candidate for r in recording.candidates] == [
        *timer.candidates.all(),
        *timer.candidates.beyond(),
    ]
    assert len(recording.cold.time_ms) == len(recording.hot.time_ms) == 40
    assert recording.solo
    assert recording.run_overhead_ms == pytest.approx(timer.gpu.host_sync_ms, rel=0.2)
    truth = timer.truth("burst")
    for recorded_candidate in recording.candidates:
        text = recorded_candidate.text
        assert (recorded_candidate.first_run_ms is not None) == (text in truth), text
        assert bool(recorded_candidate.error) == (text not in truth), text


def test_solo_blocks_run_until_they_are_steady() -> None:
    timer = simulation.preset("forum-l4", 1)
    recording = recorded(timer, solo=2)
    truth = timer.truth("sustained")
    assert [trace.text for trace in recording.solo] == ["128x128", "128x64"]
    for trace in recording.solo:
        assert trace.at_ms[-1] > 600
        end = statistics.median(trace.time_ms[-len(trace.time_ms) // 4 :])
        assert end == pytest.approx(truth[trace.text], rel=0.02)
    phases = [reading.phase for reading in recording.readings]
    assert phases == ["start", "rounds", "128x128", "128x64"]
    assert recording.readings[2].throttle_reasons == ("sw_power_cap",)


# The file


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_round_trip(small: Recording, tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    save(small, first)
    loaded = Recording.load(first)
    assert loaded.problem == small.problem == PROBLEM
    assert loaded.environment == small.environment
    assert [r.candidate for r in loaded.candidates] == [r.candidate for r in small.candidates]
    for row, kept in zip(small.cold.time_ms, loaded.cold.time_ms, strict=True):
        for value, other in zip(row, kept, strict=True):
            assert (value is None) == (other is None)
            assert value is None or other == pytest.approx(value, rel=1e-4)
    save(loaded, second)
    assert Recording.load(second) == loaded
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [first.name, second.name]


def test_unlisted_candidates_and_pytorchs_own_path(tmp_path: Path) -> None:
    unlisted = replace(candidate("eng78:KERNEL_CFG=9", 1009), heuristic_mode="")
    timer = timer_of(
        engine("a", 1.0),
        SimulatedEngine(OWN_PATH, 2.0, 10.0),
        SimulatedEngine(unlisted, 0.9, 10.0),
        built=False,
    )
    save(recorded(timer, rounds=2, solo=0), tmp_path / "r.json")
    again = ReplayTimer(Recording.load(tmp_path / "r.json")).candidates
    assert list(again.beyond()) == [OWN_PATH, unlisted]


# Large files


def test_a_file_that_unpacks_to_more_than_a_recording_has_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(b"[" + b"null," * 26_000_000 + b"null]", 9, mtime=0))
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="larger than 4194304 bytes"):
            Recording.load(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


# Bad files

Change = Callable[[dict[str, Any]], object]


def put(*path: Any) -> Change:
    """Sets the value at ``path[:-1]`` to ``path[-1]``."""
    *parents, last, value = path

    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in parents:
            node = node[key]
        node[last] = value

    return change


def drop(*path: Any) -> Change:
    *parents, last = path

    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in parents:
            node = node[key]
        del node[last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "something else"), "format: must be 'cudnn-autotune recording'"),
        (drop("format"), "format: must be"),
        (put("version", 3), "version: must be 2; this package reads no other, got 3"),
        (put("version", 1), "version: must be 2"),
        (put("version", 2.0), "version: must be 2"),
        (put("version", True), "version: must be 2"),
        (drop("version"), "version: must be 2"),
        (drop("problem"), "problem: is missing"),
        (put("surprise", 1), "surprise: is not a known field"),
        (put("environment", []), "environment: must be an object"),
        (drop("environment", "gpu"), "environment.gpu: is missing"),
        (drop("problem", "stride"), "problem.stride: is missing"),
        (put("problem", "op", "backward"), "problem.op: must be one of fprop, dgrad, wgrad"),
        (put("problem", "groups", 3), "problem: input_shape must have"),
        (put("problem", "input_shape", [1, 2]), "problem.memory_format: must be contiguous"),
        (put("problem", "input_shape", 0, 1.5), r"problem.input_shape\[0\]: must be a whole"),
        (put("problem", "dtype", "int8"), "problem.dtype: must be one of"),
        (put("problem", "alignment", [3, 3, 3]), "problem: alignment must be"),
        (put("problem", "allow_tf32", 1), "problem.allow_tf32: must be true or false"),
        (put("aten_uses_cudnn", None), "aten_uses_cudnn: must be true or false"),
        (put("candidates", {}), "candidates: must be a list"),
        (put("candidates", 0, "text", ""), r"candidates\[0\].text: must be a text that is not"),
        (put("candidates", 1, "text", "engine2"), r"candidates\[1\].text: .* is listed twice"),
        (put("candidates", 0, "engine", None), r"candidates\[0\].engine: must be a whole number"),
        (put("candidates", 0, "knobs", {"A": 1.5}), r"candidates\[0\].knobs.A: must be a whole"),
        (put("candidates", 0, "heuristic_mode", "C"), r"candidates\[0\].heuristic_mode: must be"),
        (put("candidates", 0, "first_run_ms", -1), r"candidates\[0\].first_run_ms: must be a num"),
        (put("candidates", 0, "first_run_ms", None), r"candidates\[0\].error: must say why"),
        (put("candidates", 0, "numerical_notes", [1]), r"numerical_notes\[0\]: must be a text"),
        (drop("cold", "calls"), "cold.calls: is missing"),
        (drop("cold", "calls", 0), "cold.calls: must have 16 entries, got 15"),
        (drop("cold", "time_ms", 2, 0), r"cold.time_ms\[2\]: must have 16 entries, got 15"),
        (drop("hot", "clock_mhz", 1), "hot.clock_mhz: must have 4 entries, got 3"),
        (drop("hot", "clock_mhz", 1, 0), r"hot.clock_mhz\[1\]: must have 16 entries, got 15"),
        (put("hot", "time_ms", 1, 0, 0), r"hot.time_ms\[1\]\[0\]: must be a number above"),
        (put("hot", "time_ms", 1, 0, -0.5), r"hot.time_ms\[1\]\[0\]: must be a number from"),
        (put("hot", "time_ms", 1, 0, "1"), r"hot.time_ms\[1\]\[0\]: must be a number from"),
        (put("hot", "time_ms", 1, 0, math.nan), "NaN is not a number that JSON may hold"),
        (put("hot", "time_ms", 1, 0, math.inf), "Infinity is not a number"),
        (put("hot", "time_ms", 1, 0, 10**400), r"hot.time_ms\[1\]\[0\]: must be a number from"),
        (put("cold", "calls", 0, 0), r"cold.time_ms\[0\]\[0\]: must be null, as calls\[0\] is 0"),
        (drop("lone", 0, 0), r"lone\[0\]: must have 16 entries, got 15"),
        (put("solo", 0, "text", "nobody"), r"solo\[0\].text: 'nobody' is no candidate that ran"),
        (put("solo", 0, "cache", "warm"), r"solo\[0\].cache: must be one of cold, hot"),
        (put("solo", 0, "calls", 0), r"solo\[0\].calls: must be 1 or more"),
        (drop("solo", 0, "time_ms", 0), r"solo\[0\].time_ms: must have \d+ entries"),
        (drop("solo", 0, "clock_mhz", 0), r"solo\[0\].clock_mhz: must have \d+ entries"),
        (put("solo", 0, "at_ms", []), r"solo\[0\].at_ms: must not be empty"),
        (drop("solo", 0, "power_w"), r"solo\[0\].power_w: is missing"),
        (drop("solo", 0, "power_w", 0), r"solo\[0\].power_w: must have \d+ entries"),
        (put("solo", 0, "power_w", 0, -1), r"solo\[0\].power_w\[0\]: must be a number from"),
        (put("readings", 0, "reports_throttling", 1), "reports_throttling: must be true or false"),
        (put("readings", 0, "power_w", -1), r"readings\[0\].power_w: must be a number from 0"),
        (drop("readings", 0, "phase"), r"readings\[0\].phase: is missing"),
        (put("build_threads", 0), "build_threads: must be a whole number from 1"),
        (put("build_threads", 2**62), "build_threads: must be a whole number from 1 to 4096"),
        (put("run_overhead_ms", None), "run_overhead_ms: must be a number from 0"),
        (put("remarks", "none"), "remarks: must be a list"),
    ],
)
def test_bad_fields(tree: dict[str, Any], tmp_path: Path, change: Change, message: str) -> None:
    changed = copy.deepcopy(tree)
    change(changed)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message) as raised:
        Recording.load(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.json", b"", "not JSON, or truncated"),
        ("r.json", b"\xff\xfe\x00", "not JSON, or truncated"),
        ("r.json", b"[]", "this is no recording"),
        ("r.json", b"null", "this is no recording"),
        ("r.json", b"[" * 100_000, "nested too deeply"),
        ("r.json", gzip.compress(b"{}", mtime=0), "not JSON, or truncated"),
        ("r.json.gz", b"{}", "not gzip, or truncated"),
        ("r.json.gz", b"", "not JSON, or truncated"),
        ("r.json.gz", gzip.compress(b"{}", mtime=0)[:-4], "not gzip, or truncated"),
        (
            "r.json.gz",
            gzip.compress(b"{}" * 100, mtime=0)[:15] + b"\x07" * 20,
            "not gzip, or truncated",
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        Recording.load(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_time_that_is_no_number_is_not_kept(small: Recording) -> None:
    rounds = replace(small.cold, time_ms=((math.nan,) * 16, *small.cold.time_ms[1:]))
    with pytest.raises(ValueError, match=r"cold.time_ms\[0\]\[0\]: must be a number above"):
        replace(small, cold=rounds)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, 1, -1, 1e-9, 1e-320, 1e15, 1e308, 2**63, 10**30, "aten", "engine0"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_changed_it_loads_and_plays_or_raises_value_error(
    tree: dict[str, Any], tmp_path: Path, data: st.DataObject
) -> None:
    changed = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(changed)))
        if data.draw(st.integers(0, 3)):
            put(*path, data.draw(any_json))(changed)
        else:
            drop(*path)(changed)
        if not changed:
            break
    file = tmp_path / "r.json"
    file.write_text(json.dumps(changed))
    try:
        recording = Recording.load(file)
    except ValueError:
        return
    timer = ReplayTimer(recording, 1)
    built = timer.runnable([*timer.candidates.all(), *timer.candidates.beyond()])
    for batches in ([Batch(c, 2) for c in built], [Batch(c, 9, "hot") for c in built[:1]] * 9):
        for sample in timer.run(batches):
            assert sample.time_ms > 0
    engines = [c for c in built if c.engine is not None]
    timer.frontend_find("till_stable", engines, 0)
    timer.state()
    for kind in ("burst", "sustained"):
        for cache in ("cold", "hot"):
            assert all(t > 0 for t in timer.truth(kind, cache).values())  # type: ignore[arg-type]


@given(st.binary(max_size=200), st.booleans(), st.booleans())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_any_kind(tmp_path: Path, content: bytes, gzipped: bool, named: bool) -> None:
    path = tmp_path / ("r.json.gz" if named else "r.json")
    path.write_bytes(gzip.compress(content) if gzipped else content)
    with pytest.raises(ValueError):
        Recording.load(path)


# The recordings that the package ships: they load, and every mode plays on them

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
    for mode in AT_ONCE:
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
