#!/usr/bin/env python
"""At the board's power limit: how far do short blocks of one engine differ, as measured, and
brought to the limit by the power that they drew? (docs/findings/power-limit.md)

The engines of a layer that lead in bursts run alone: six blocks of 0.16 s each, in turns, and two
of 0.7 s, which are what short ones should tell. `cudnn_autotune.timers.board_power` brings a block
to the limit, by NVML's instant power. `cudnn-autotune audit --sustained always` says which engine
wins in the long run, and which mode finds it.

    python benchmarks/power_limit.py --json power_limit.json
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

CASES = (
    "yolov8l_c2f4_join/dgrad/float16",
    "sd_unet_down_320/fprop/float16",
    "resnet50_layer4_1x1/dgrad/float16",
)
LEADERS = 4
SHORT, LONG = (0.16, 6), (0.7, 2)  # seconds, and how many blocks of each engine
BATCH_MS = 5.0


def block(timer: Any, candidate: Any, call_ms: float, seconds: float) -> list[Any]:
    """Samples of batches of one engine, hot, one behind the other."""
    from cudnn_autotune.timers.timer import Batch

    calls = max(1, min(500, math.ceil(BATCH_MS / call_ms)))
    count = max(4, round(seconds * 1e3 / (calls * call_ms)))
    return [(calls, sample) for sample in timer.run([Batch(candidate, calls, "hot")] * count)]


def ended_ms(samples: list[Any], share: float) -> float:
    """A call in the last ``share`` of a block."""
    last = samples[-max(1, int(share * len(samples))) :]
    return statistics.fmean(sample.time_ms for _, sample in last)


def at_limit_ms(samples: list[Any], board: Any) -> float | None:
    """A call at the power limit; None where no reading of the power fell into the block."""
    from cudnn_autotune.timers import board_power

    found = board_power.at_limit_ms(
        [s.time_ms for _, s in samples],
        [s.clock_mhz for _, s in samples],
        [s.power_w for _, s in samples],
        board,
        since=board_power.arrived([calls * s.time_ms for calls, s in samples]),
    )
    return statistics.fmean(found) if found else None


def spread_percent(times_ms: list[float]) -> float | None:
    """Standard deviation of the logarithm, in percent."""
    if len(times_ms) < 2:
        return None
    return 100 * statistics.stdev(map(math.log, times_ms))


def measure(case: Any) -> Iterator[investigation.Row]:
    with engines.opened(case.problem()) as (timer, candidates):
        burst_ms = dict(list(engines.ranked(timer, candidates).items())[:LEADERS])
        leaders, board = list(burst_ms), timer.state()
        block(timer, leaders[0], burst_ms[leaders[0]], 0.3)
        blocks: dict[Any, dict[float, list[Any]]] = {
            c: {SHORT[0]: [], LONG[0]: []} for c in leaders
        }
        for seconds, rounds in (SHORT, LONG):
            for _ in range(rounds):
                for candidate in leaders:
                    found = block(timer, candidate, burst_ms[candidate], seconds)
                    blocks[candidate][seconds].append(found)
                leaders.reverse()
        for candidate in leaders:
            short, long = (blocks[candidate][seconds] for seconds, _ in (SHORT, LONG))
            brought = [ms for one in short if (ms := at_limit_ms(one, board)) is not None]
            steady_ms = statistics.fmean(ended_ms(one, 3 / 4) for one in long)
            off = 100 * (statistics.fmean(brought) / steady_ms - 1) if brought else None
            yield {
                "engine": candidate.text,
                "bursts (ms)": burst_ms[candidate],
                "blocks of 0.7 s (ms)": steady_ms,
                "blocks of 0.16 s: spread (%)": spread_percent([ended_ms(b, 1 / 3) for b in short]),
                "at the limit: spread (%)": spread_percent(brought),
                "with a reading": f"{len(brought)} of {len(short)}",
                "off the blocks of 0.7 s (%)": off,
            }


if __name__ == "__main__":
    title = "Blocks of one engine at the power limit, alone, on hot operands"
    sys.exit(investigation.run(__file__, __doc__, CASES, measure, title))
