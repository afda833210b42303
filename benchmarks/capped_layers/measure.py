"""The worker of capped.py: one layer in one direction, in bursts and alone, and what modes pick."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from common import numbers
from common.leading import REACH, leaders, raced
from common.sources import Source, failure, fast_listed, select, shortened, source_of

if TYPE_CHECKING:
    from cudnn_autotune.audit.steady_time import SteadyTime

_CACHES: tuple[Literal["cold"], Literal["hot"]] = ("cold", "hot")
# A burst's load on the board: short against the 60 to 80 ms after which a power controller acts.
_BURST_ROUNDS = 2
_BLOCK_BATCH_MS = 5.0
# Of a case's time: where one run of all modes took longer, there is no second one.
_SHARE_OF_MODES = 0.35
_LEAST_LEADERS = 2


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ``pick`` records, then ``burst``, then one ``solo`` a block, then ``sustained``;
    ``failed`` for a step that failed: the others still count."""
    begin = time.monotonic()
    source = source_of(request)
    # Lazy loading of libraries is no mode's fault: the first search of a process pays for it.
    select(source, "heuristic")
    picked: set[str] = set()
    modes = request["modes"]
    for run in range(request["runs"]):
        if run and time.monotonic() - begin > _SHARE_OF_MODES * request["seconds"]:
            yield {"part": "failed", "step": "modes", "error": f"no time for run {run + 1}"}
            break
        for mode in modes if run % 2 == 0 else modes[::-1]:
            time.sleep(0 if request["device"] == "cpu" else request["rest_s"])
            pick = select(source, mode)
            if pick.text is not None:
                picked.add(pick.text)
            yield {"part": "pick", "mode": mode, "run": run + 1, "pick": shortened(pick)}
    try:
        yield from truths(source, picked, request, begin)
    except Exception as error:  # a layer that fails is recorded, and the next one has its turn
        yield {"part": "failed", "step": "truths", "error": failure(error)}


def truths(
    source: Source, picked: set[str], request: dict[str, Any], begin: float
) -> Iterator[dict[str, Any]]:
    from cudnn_autotune.audit.analysis import truth_of
    from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, Oracle
    from cudnn_autotune.audit.pairing import of_blocks, of_rounds
    from cudnn_autotune.audit.steady_time import at_one_power
    from cudnn_autotune.core import json_dataclass

    timer, candidates = source.open()
    try:
        known = fast_listed(candidates, picked)
        turns, survivors = raced(timer, known, picked)
        turns.clocks_mhz.clear()
        times: dict[str, dict[str, list[float]]] = {cache: {} for cache in _CACHES}
        for _ in range(request["bursts"]):
            source.rest(timer, request["rest_s"])
            found = turns.interleaved(survivors, _BURST_ROUNDS, _CACHES)
            for cache, rows in found.items():
                for text, row in rows.items():
                    times[cache].setdefault(text, []).extend(row)
        for rows in times.values():
            for text in turns.failed:
                rows.pop(text, None)
        if not all(times.values()):
            raise RuntimeError("every candidate failed in the bursts")
        burst = {BURST_COLD: of_rounds(times["cold"]), BURST_HOT: of_rounds(times["hot"])}
        mean = truth_of(Oracle(burst), BURST)
        assert mean is not None
        clocks = turns.clocks_mhz
        yield {
            "part": "burst",
            "truths": json_dataclass.encode(burst),
            "candidates": len(known),
            "clock_mhz": numbers.significant(statistics.median(clocks)) if clocks else None,
            "least_clock_mhz": numbers.significant(min(clocks)) if clocks else None,
            "max_clock_mhz": timer.state().max_clock_mhz,
            "failed": turns.failed,
        }
        by_text = {c.text: c for c in survivors}
        order = sorted(mean.times_ms, key=mean.times_ms.__getitem__)
        chosen = leaders(order, by_text, mean.times_ms, request["leaders"])
        each_s = 2 * (request["solo_s"] * REACH + request["rest_s"])
        left_s = request["seconds"] - (time.monotonic() - begin)
        if request["device"] == "cuda":
            chosen = chosen[: max(_LEAST_LEADERS, int(left_s / each_s))]
        # What was picked is judged, whatever time it takes.
        chosen += [text for text in order if text in picked and text not in chosen]
        blocks: dict[str, list[SteadyTime]] = {text: [] for text in chosen}
        for text in [*chosen, *reversed(chosen)]:
            source.rest(timer, request["rest_s"])
            steady, block = solo(timer, by_text[text], mean.times_ms[text], request["solo_s"])
            yield {"part": "solo", "text": text, **block}
            if steady is not None:
                blocks[text].append(steady)
        complete = {text: row for text, row in blocks.items() if len(row) == 2}
        if complete:
            truth = of_blocks(at_one_power(complete))
            yield {"part": "sustained", "truth": json_dataclass.encode(truth)}
    finally:
        source.close(timer)


def solo(
    timer: Any, candidate: Any, call_ms: float, seconds: float
) -> tuple[SteadyTime | None, dict[str, Any]]:
    """A candidate alone for ``seconds``, cold and hot batches in turn, without a pause.

    Returns:
        Its steady time, None where it fails; and the same for the record: ``time_ms`` is the
        geometric mean of both cache states, as measured, ``power_w`` what the board read meanwhile
        where its limit held the clock, ``trace`` the block pair by pair.
    """
    from cudnn_autotune.audit.steady_time import steady_time
    from cudnn_autotune.timers.timer import Batch

    calls = max(1, min(math.ceil(_BLOCK_BATCH_MS / max(call_ms, 1e-4)), 500))
    pairs = max(4, math.ceil(seconds * 1e3 / (2 * calls * call_ms)))
    batches = [Batch(candidate, calls, cache) for cache in _CACHES] * pairs
    begin_s = time.monotonic()
    samples = timer.run(batches)
    end_s = time.monotonic()
    wrong = next((s for s in samples if not math.isfinite(s.time_ms)), None)
    if wrong is not None:
        return None, {"error": wrong.error or "fails to run"}
    now_ms = 0.0
    trace: dict[str, list[float | None]] = {"t_ms": [], "time_ms": [], "clock_mhz": []}
    for cold, hot in zip(samples[::2], samples[1::2], strict=True):
        now_ms += calls * (cold.time_ms + hot.time_ms)
        clocks = [s.clock_mhz for s in (cold, hot) if s.clock_mhz is not None]
        trace["t_ms"].append(round(now_ms, 1))
        trace["time_ms"].append(numbers.significant(math.sqrt(cold.time_ms * hot.time_ms), 5))
        trace["clock_mhz"].append(
            numbers.significant(statistics.fmean(clocks), 4) if clocks else None
        )
    steady = steady_time([(b.cache, s) for b, s in zip(batches, samples, strict=True)])
    return steady, {
        "time_ms": steady.time_ms,
        "clock_mhz": steady.clock_mhz and numbers.significant(steady.clock_mhz, 4),
        "power_w": steady.power_w and numbers.significant(steady.power_w, 5),
        "calls": 2 * pairs * calls,
        "trace": trace,
        "begin_monotonic_s": begin_s,
        "end_monotonic_s": end_s,
    }
