"""How long until `online` has decided, and how good what it took is."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from common import numbers

from .problems import Call, measured, our_call
from .rounds import rounds_of, runners

# A loop that waits for the GPU now and then, as one does that reads its loss.
_CALLS_AT_ONCE = 16
# Of each mode's own ranking, those that may be the fastest.
_CONTENDERS = 4
_ROUNDS = 16
_BATCH_MS = 0.7
_MOST_CALLS = 64


def decide(call: Call, end: float) -> tuple[int, float]:
    """(calls, seconds) until the trial is over, or until ``end``."""
    import torch

    from cudnn_autotune.tuning.online_tuner import TUNER

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    calls = 1
    while TUNER.undecided:
        call()
        calls += 1
        if calls % _CALLS_AT_ONCE == 0:
            torch.cuda.synchronize()
            if time.monotonic() > end:
                break
    return calls, time.perf_counter() - begin


def made(problem: Any, mode: str) -> Any:
    import cudnn_autotune as ca

    found = [c for c in ca.choices() if (c.problem, c.sampling) == (problem, mode)]
    return found[-1] if found else None


def contenders(choices: list[Any]) -> list[Any]:
    """What was chosen, and the fastest of each ranking."""
    found = {}
    for choice in choices:
        timed = [t for t in choice.selection.ranking if t.time_ms is not None]
        timed.sort(key=lambda t: t.time_ms)
        for entry in [choice.chosen, *timed[:_CONTENDERS]]:
            found.setdefault(entry.candidate.text, entry.candidate)
    return list(found.values())


def side_by_side(timer: Any, candidates: list[Any], seed: int = 0) -> dict[str, float]:
    """Milliseconds a call of those that run: batches in rounds of random order, cold and hot
    operands by turns; the geometric mean of the two medians."""
    from cudnn_autotune.timers.timer import Batch

    runnable = timer.runnable(candidates)
    calls = {}
    for candidate in runnable:
        timer.run([Batch(candidate, 1, "hot")])  # loads its kernel
        (sample,) = timer.run([Batch(candidate, 1, "hot")])
        if not sample.error:
            size = int(_BATCH_MS / max(sample.time_ms, 1e-4))
            calls[candidate] = min(_MOST_CALLS, max(1, size))
    logs: dict[str, dict[str, list[float]]] = {c.text: {"cold": [], "hot": []} for c in calls}
    source = random.Random(seed)
    for index in range(_ROUNDS):
        cache = ("cold", "hot")[index % 2]
        order = source.sample(list(calls), len(calls))
        samples = timer.run([Batch(c, calls[c], cache) for c in order])
        for candidate, sample in zip(order, samples, strict=True):
            if not sample.error:
                logs[candidate.text][cache].append(math.log(sample.time_ms))
    return {
        text: math.exp(sum(map(numbers.median, both.values())) / 2)
        for text, both in logs.items()
        if all(both.values())
    }


def one_by_one(problem: Any, data: Any, plans: dict[str, Any], seed: int = 0) -> dict[str, float]:
    """Milliseconds of single calls in turns, another's kernel before each; medians."""
    calls = runners(problem, data, plans)
    source = random.Random(seed)
    rounds_of(calls, "queued", source)  # what is loaded or allocated, is so now
    found = rounds_of(calls, "queued", source)
    return {text: numbers.median(times) for text, times in found.items() if times}


def judged(
    online: str, auto: str, times_ms: dict[str, float], single_ms: dict[str, float] | None = None
) -> dict[str, Any]:
    """Regrets as fractions: 0.01 is 1 % slower.

    Args:
        times_ms: in batches.
        single_ms: in single calls; None where there are none.
    """
    best = min(times_ms, key=times_ms.__getitem__)
    told = {
        "picked": online,
        "auto": auto,
        "best": best,
        "times_ms": {text: numbers.significant(ms) for text, ms in times_ms.items()},
        "regret": numbers.significant(times_ms[online] / times_ms[best] - 1),
        "auto_regret": numbers.significant(times_ms[auto] / times_ms[best] - 1),
        "against_auto": numbers.significant(times_ms[online] / times_ms[auto] - 1),
    }
    if single_ms:
        least = min(single_ms.values())
        told["single_ms"] = {text: numbers.significant(ms) for text, ms in single_ms.items()}
        told["single_regret"] = numbers.significant(single_ms[online] / least - 1)
        told["auto_single_regret"] = numbers.significant(single_ms[auto] / least - 1)
    return told


def of_gpu(problem: Any, end: float) -> dict[str, Any]:
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.timers.gpu_timer import GpuTimer
    from cudnn_autotune.timers.measuring import operands
    from cudnn_autotune.tuning.online_tuner import TUNER

    data = operands(problem)
    ca.forget()
    online_call = our_call(problem, data, "online")
    calls, seconds = decide(online_call, end)
    if TUNER.undecided:
        return {"error": f"undecided after {calls} calls and {seconds:.1f} s"}
    our_call(problem, data, "auto")()
    torch.cuda.synchronize()
    online, auto = made(problem, "online"), made(problem, "auto")
    if online is None or auto is None or not online.time_ms or not auto.time_ms:
        return {"error": f"no choice was made: {ca.fallbacks()}"}
    timer = GpuTimer.open(problem)
    try:
        times_ms = side_by_side(timer, contenders([online, auto]))
        plans = {text: timer.plans.get(text) for text in times_ms}
    finally:
        timer.close()
    if lacking := {online.text, auto.text} - set(times_ms):
        return {"error": f"not timed: {', '.join(sorted(lacking))}"}
    told = {
        "calls": calls,
        "seconds": numbers.significant(seconds, 4),
        "turns": online.total_samples,
        "candidates": len(online.ranking),
        "regret_bound": online.selection.evidence.regret_bound,
        "is_undecided": any("undecided" in r for r in online.selection.evidence.remarks),
        "auto_tuning_ms": numbers.significant(auto.tuning_ms, 4),
    }
    single_ms = one_by_one(problem, data, plans)
    return {**told, **judged(online.text, auto.text, times_ms, single_ms)}


def of_simulation(op: str) -> dict[str, Any]:
    """The same on the simulated GPU, where each timer's clock is virtual."""
    from common import simulated
    from common.sources import SIMULATED

    from cudnn_autotune import sampling
    from cudnn_autotune.sampling.strategy import Limits

    seed = ("fprop", "dgrad", "wgrad").index(op)
    picks = {}
    for mode in ("online", "auto"):
        timer = simulated.preset(SIMULATED, seed)
        picks[mode] = sampling.get(mode).select(timer.candidates, timer, Limits())
    online, auto = picks["online"], picks["auto"]
    timer = simulated.preset(SIMULATED, seed)
    known = {t.candidate.text: t.candidate for s in (online, auto) for t in s.ranking[:_CONTENDERS]}
    times_ms = side_by_side(timer, list(known.values()))
    told = {
        "calls": online.total_samples,
        "seconds": numbers.significant(online.evidence.wall_ms / 1e3, 4),
        "turns": online.total_samples,
        "candidates": len(online.ranking),
        "regret_bound": online.evidence.regret_bound,
        "auto_tuning_ms": numbers.significant(auto.evidence.wall_ms, 4),
    }
    texts = (online.winner.candidate.text, auto.winner.candidate.text)
    return {**told, **judged(*texts, times_ms)}


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record a case."""
    return measured(request, of_simulation, of_gpu)
