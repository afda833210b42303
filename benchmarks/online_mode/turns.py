"""What one call of each finalist seems to take, by what ran just before it: `online` sees single
calls, each after another engine's kernel; a network that has decided runs one engine alone.

calls    as `online` itself times them: in turns, the host some calls ahead of the GPU at most.
The others are those of ``rounds``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from common import numbers

from .convergence import decide, made
from .problems import Call, measured, our_call
from .rounds import QUEUED, ROUND_ARMS, ROUNDS, Times, rounds_of, runners

ARMS = ("calls", *ROUND_ARMS)
_FINALISTS = 5
_CALLS_AT_ONCE = 16
# The tuner's thread has read all samples by then (its longest sleep, with one trial, is 0.16 s).
_READ_S = 0.4


def finalists(online: Any, auto: Any) -> list[Any]:
    """The fastest of those that took turns, what was picked first; and `auto`'s pick, if it did."""
    timed = [t for t in online.selection.ranking if t.time_ms is not None]
    timed.sort(key=lambda t: t.time_ms)
    wanted = [online.text, *(t.candidate.text for t in timed[: _FINALISTS - 1]), auto.text]
    by_text = {t.candidate.text: t.candidate for t in timed}
    return [by_text[text] for text in dict.fromkeys(wanted) if text in by_text]


def in_calls(call: Call, texts: list[str], end: float) -> Times:
    """A trial that never ends, from some moment on of these candidates only."""
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.sampling.online_race import OnlineRace
    from cudnn_autotune.tuning.online_tuner import TUNER, Trial

    trials: list[Trial] = []
    samples: list[tuple[int, int, float]] = []
    start, take = TUNER.add, OnlineRace.add

    def watch(trial: Trial) -> None:
        trials.append(trial)
        start(trial)

    def keep(race: OnlineRace, read: list[tuple[int, int, float]]) -> None:
        samples.extend(read)
        take(race, read)

    def some(count: int) -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    ca.forget()
    with (
        mock.patch.object(TUNER, "add", watch),
        mock.patch.object(OnlineRace, "add", keep),
        mock.patch.object(OnlineRace, "judge", return_value=None),
    ):
        some(1)
        while TUNER.preparing and time.monotonic() < end:
            some(_CALLS_AT_ONCE)
        some(_CALLS_AT_ONCE)
        time.sleep(_READ_S)
        (trial,) = trials
        taking_part = {c.text: i for i, c in enumerate(trial.race.candidates) if c.text in texts}
        for i in range(len(trial.race.candidates)):
            if i not in taking_part.values():
                trial.schedule.drop(i)
        before = max((round_ for _, round_, _ in samples), default=0) + 1
        # Every other call is the leader's.
        for _ in range(2 * ROUNDS * len(texts) // _CALLS_AT_ONCE + 2):
            some(_CALLS_AT_ONCE)
        time.sleep(_READ_S)
        ca.forget()
    return {
        text: [ms for way, round_, ms in samples if way == i and round_ > before]
        for text, i in taking_part.items()
    }


def of_gpu(problem: Any, end: float) -> dict[str, Any]:
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.timers.gpu_timer import GpuTimer
    from cudnn_autotune.timers.measuring import operands
    from cudnn_autotune.tuning.online_tuner import TUNER

    data = operands(problem)
    ca.forget()
    call = our_call(problem, data, "online")
    decide(call, end)
    our_call(problem, data, "auto")()
    online, auto = made(problem, "online"), made(problem, "auto")
    if TUNER.undecided or online is None or auto is None or not online.total_samples:
        return {"error": "no choice was made in time"}
    wanted = finalists(online, auto)
    found = {"calls": in_calls(call, [c.text for c in wanted], end)}
    timer = GpuTimer.open(problem)
    try:
        runnable = timer.runnable(wanted)
        plans = {c.text: timer.plans.get(c.text) for c in runnable}
    finally:
        timer.close()
    calls = runners(problem, data, plans)
    source = random.Random(0)
    for arm in ARMS[1:]:
        rounds_of(calls, arm, source)  # what is loaded or allocated, is so now
        found[arm] = rounds_of(calls, arm, source)
    torch.cuda.synchronize()
    return {"picked": online.text, "auto": auto.text, **compared(found)}


def of_simulation(op: str) -> dict[str, Any]:
    """The same on the simulated GPU, to which it is all one what ran before."""
    from common import simulated
    from common.sources import SIMULATED

    from cudnn_autotune import sampling
    from cudnn_autotune.sampling.strategy import Limits
    from cudnn_autotune.timers.timer import Batch

    timer = simulated.preset(SIMULATED, ("fprop", "dgrad", "wgrad").index(op))
    selection = sampling.get("online").select(timer.candidates, timer, Limits())
    assert selection is not None
    wanted = [t.candidate for t in selection.ranking if t.time_ms is not None][:_FINALISTS]
    found: dict[str, Times] = {arm: {c.text: [] for c in wanted} for arm in ARMS}
    for arm in ARMS:
        before, timed = QUEUED.get(arm, (0, 1))
        for _ in range(10):
            for c in wanted:
                batches = [*[Batch(c, 1, "hot")] * before, Batch(c, timed, "hot")]
                found[arm][c.text].append(timer.run(batches)[-1].time_ms)
    picked = selection.winner.candidate.text
    return {"picked": picked, "auto": picked, **compared(found)}


def compared(found: dict[str, Times]) -> dict[str, Any]:
    """By arm: every finalist's times (ms); by how much its fastest is behind in batches."""
    spreads = {
        arm: {
            text: {k: numbers.significant(v) for k, v in numbers.spread(values).items()}
            for text, values in times.items()
            if values
        }
        for arm, times in found.items()
    }
    batch = {text: spread["median"] for text, spread in spreads["batch"].items()}
    regret = {}
    for arm, of_text in spreads.items():
        medians = {text: spread["median"] for text, spread in of_text.items() if text in batch}
        if medians:
            fastest = min(medians, key=medians.__getitem__)
            regret[arm] = numbers.significant(batch[fastest] / min(batch.values()) - 1)
    return {"times_ms": spreads, "regret": regret}


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record a case."""
    return measured(request, of_simulation, of_gpu)
