"""What constants in the code rest on, computed again from the records of docs/findings."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.processes.benchmark_scripts import BENCHMARKS

from cudnn_autotune import _C, sampling
from cudnn_autotune.audit import recordings
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.engines.unlisted import KERNEL_CFGS
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sustained import run as sustained_run
from cudnn_autotune.sustained.final import _POWER_ERROR
from cudnn_autotune.timers.board_power import (
    EXPONENT,
    FAR_FROM_LIMIT,
    NEAR_LIMIT,
    arrived,
    at_limit_ms,
)
from cudnn_autotune.timers.telemetry import GpuState


def cases(record: str) -> dict[str, Any]:
    data = json.loads((BENCHMARKS / "results" / "h200" / f"{record}.json").read_text())
    found: dict[str, Any] = data["results"]["cases"]
    return found


def ended_ms(block: dict[str, Any], share: float) -> float:
    """A call in the last ``share`` of a block."""
    times = block["times_ms"]
    return statistics.fmean(times[-max(1, math.floor(share * len(times))) :])


def brought_ms(
    block: dict[str, Any],
    board: dict[str, Any],
    exponent: float = EXPONENT,
    within: float = NEAR_LIMIT,
) -> float | None:
    """A call at the power limit, by the readings in a block."""
    found = at_limit_ms(
        block["times_ms"],
        block["clocks_mhz"],
        block["powers_w"],
        GpuState(power_limit_w=board["power_limit_w"], max_clock_mhz=board["max_clock_mhz"]),
        since=arrived([block["calls"] * ms for ms in block["times_ms"]]),
        exponent=exponent,
        within=within,
    )
    return statistics.fmean(found) if found else None


def alone() -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]], float]]:
    """(case, its board, short blocks, a call's time in the long ones) of each engine."""
    for case, entry in cases("board_power").items():
        for text in dict.fromkeys(block["text"] for block in entry["blocks"]):
            mine = [block for block in entry["blocks"] if block["text"] == text]
            short = [block for block in mine if block["kind"] == "short"]
            long = [ended_ms(block, 3 / 4) for block in mine if block["kind"] == "long"]
            yield case, entry["board"], short, statistics.fmean(long)


def spread(times_ms: list[float]) -> float:
    """Standard deviation of the logarithm."""
    return statistics.stdev(map(math.log, times_ms))


def test_blocks_at_the_power_limit_agree_by_the_power_that_they_drew() -> None:
    """What ``timers.board_power`` and ``sustained.run`` rest on."""
    measured, at_limit = [], []
    far: list[tuple[float, float]] = []
    for _, board, short, long_ms in alone():
        near = [brought_ms(block, board) for block in short]
        measured.append(spread([ended_ms(block, 1 / 3) for block in short]))
        at_limit.append(spread([ms for ms in near if ms is not None]))
        for block, ms in zip(short, near, strict=True):
            if (
                ms is None
                and (far_ms := brought_ms(block, board, within=FAR_FROM_LIMIT)) is not None
            ):
                far.append((ended_ms(block, 1 / 3) / long_ms, far_ms / long_ms))
    assert statistics.median(measured) > sustained_run.RUN_SIGMA
    assert statistics.median(at_limit) < sustained_run._READING_SIGMA
    assert statistics.median(at_limit) < statistics.median(measured) / 4
    assert len(far) >= 5
    off, brought = (
        math.sqrt(statistics.fmean(math.log(ratio) ** 2 for ratio in ratios))
        for ratios in zip(*far, strict=True)
    )
    assert off > 4 * sustained_run.RUN_SIGMA
    assert brought < sustained_run.FAR_READING_SIGMA


def test_times_at_the_limit_are_as_far_from_long_blocks_as_is_said() -> None:
    """From one engine to another of a layer, however many blocks there are."""
    off: dict[str, list[float]] = {}
    for case, board, short, long_ms in alone():
        found = [ms for block in short if (ms := brought_ms(block, board)) is not None]
        off.setdefault(case, []).append(math.log(statistics.fmean(found) / long_ms))
    variances = [statistics.variance(values) for values in off.values()]
    assert math.sqrt(statistics.fmean(variances)) == pytest.approx(_POWER_ERROR, rel=0.3)


def test_far_pages_are_the_faster_ones() -> None:
    """What csrc/core/cuda/page_distance.h rests on, and that ``far_pages`` reads that GPU right."""
    found = cases("workspace_place")
    ratios = [
        statistics.median(engine["times_ms"]["near"]) / statistics.median(engine["times_ms"]["far"])
        for entry in found.values()
        for engine in entry["engines"]
    ]
    assert len(ratios) >= 20
    assert statistics.geometric_mean(ratios) > 1.01
    assert sum(value > 1.15 for value in ratios) >= 2
    assert sum(value < 0.98 for value in ratios) <= 1
    for entry in found.values():
        assert _C.far_pages(entry["pages"]["cycles"]) == entry["pages"]["far"]


def played(name: str, mode: str, seed: int, limit: int = 0) -> tuple[Selection, ReplayTimer]:
    timer = ReplayTimer(recordings.load(name), seed)
    strategy: Any = sampling.get(mode)
    if hasattr(strategy, "seed"):
        strategy = dataclasses.replace(strategy, seed=seed)
    found = strategy.select(timer.candidates, timer, Limits(benchmark_limit=limit))
    return found, timer


@pytest.mark.slow
@pytest.mark.parametrize("name", recordings.names())
def test_what_a_first_call_costs(name: str) -> None:
    """The table of docs/findings/first-call.md, and that ``auto`` costs no more than PyTorch's
    benchmark."""
    page = (BENCHMARKS.parent / "docs" / "findings" / "first-call.md").read_text()
    wall_ms: dict[str, float] = {}
    for mode in ("auto", "race", "sustained"):
        runs = [played(name, mode, seed) for seed in range(20)]
        launched = [
            [e.candidate for e in found.ranking if e.time_ms is not None and not e.runs]
            for found, _ in runs
        ]
        compiled = [sum(c.is_compiled for c in some) for some in launched]
        truth = [(t.truth("burst", "cold"), t.truth("burst", "hot")) for _, t in runs]
        regrets = [
            math.sqrt(math.prod(of[found.winner.candidate.text] / min(of.values()) for of in both))
            for (found, _), both in zip(runs, truth, strict=True)
        ]
        wall_ms[mode] = statistics.median(timer.elapsed_ms() for _, timer in runs)
        columns = (
            f"{statistics.median(map(len, launched)):.0f}",
            f"{statistics.median(compiled):.0f}",
            f"{statistics.median(found.evidence.gpu_ms for found, _ in runs):.0f} ms",
            f"{wall_ms[mode]:.0f} ms",
            f"{statistics.geometric_mean(regrets):.4f}",
        )
        assert f"| {name} | `{mode}` | {' | '.join(columns)} |" in page
    # PyTorch builds all of modes A and FALLBACK, one after the other, and times ten of them.
    timed_ms = statistics.median(
        played(name, "sample_once", seed, limit=10)[1].elapsed_ms() for seed in range(20)
    )
    compiling_ms = sum(
        known.build_ms or 0.0
        for known in recordings.load(name).candidates
        if known.candidate.is_compiled and known.candidate.heuristic_mode in ("A", "FALLBACK")
    )
    assert f"| {name} | PyTorch | 10 | 1 | | {timed_ms + compiling_ms:.0f} ms | |" in page
    assert wall_ms["auto"] <= timed_ms + compiling_ms


def test_the_first_kernel_of_the_portfolio_is_near_the_best_most_often() -> None:
    """Of the layers on which a kernel of eng78 was the fastest in the audits."""
    near: Counter[str] = Counter()
    layers = set()
    for share in ("1of4", "2of4", "3of4", "4of4", "missed"):
        path = BENCHMARKS / "results" / "h200" / f"audit_layers_{share}.json"
        for case, oracle in json.loads(path.read_text())["oracle"].items():
            cold, hot = (oracle["truths"][f"burst {c}"]["times_ms"] for c in ("cold", "hot"))
            times = {text: cold[text] * hot[text] for text in cold if text in hot}
            best = min(times, key=times.__getitem__)
            if best.startswith("eng78") and case not in layers:
                layers.add(case)
                near.update(t for t, ms in times.items() if ms < 1.01**2 * times[best])
    (first, count), (_, second) = near.most_common(2)
    assert first == f"eng78:KERNEL_CFG={KERNEL_CFGS[9, 19][78][0]}"
    page = (BENCHMARKS.parent / "docs" / "findings" / "kernel-portfolio.md").read_text()
    assert f"on {count} of these {len(layers)} layers" in " ".join(page.split())
    assert count > second
