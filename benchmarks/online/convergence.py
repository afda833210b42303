"""The time until `online` has decided, and the quality of its picks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from common import engines, numbers

from .problems import Call, made, warm_up

# A loop that waits for the GPU now and then, as one does that reads its loss.
_CALLS_AT_ONCE = 16
# Of each mode's own ranking, those that may be the fastest.
_CONTENDERS = 4
_CASE_S = 15.0


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record a case, as far as its seconds reach; one that fails says why."""
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.audit.layers import Case

    end = time.monotonic() + request["seconds"]
    warm_up()
    for name, case in request["cases"].items():
        if time.monotonic() > end:
            return
        try:
            found = compared(Case(**case).problem(), min(end, time.monotonic() + _CASE_S))
        except (torch.OutOfMemoryError, ca.CudnnError) as error:
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        yield {"case": name, **found}
        ca.forget()
        torch.cuda.empty_cache()


def compared(problem: Any, end: float) -> dict[str, Any]:
    """Lets `online` decide and `race` choose; then all contenders of both take turns."""
    import cudnn_autotune as ca
    from cudnn_autotune.audit import oracle
    from cudnn_autotune.audit.model import BURST
    from cudnn_autotune.audit.summary import truth_of
    from cudnn_autotune.online.tuner import TUNER
    from cudnn_autotune.timers.measuring import operands, run_operator

    data = operands(problem)
    ca.forget()
    calls, seconds = decide(partial(run_operator, problem, data, "online"), end)
    if TUNER.undecided:
        return {"error": f"undecided after {calls} calls and {seconds:.1f} s"}
    run_operator(problem, data, "race")
    online, race = made(problem, "online"), made(problem, "race")
    if online is None or race is None or not online.time_ms or not race.time_ms:
        return {"error": f"no choice was made: {ca.fallbacks()}"}
    with engines.opened(problem) as (timer, _):
        wanted = contenders([online, race])
        truth = truth_of(oracle.measure(timer, wanted, [c.text for c in wanted]), BURST)
        times_ms = truth.times_ms if truth else {}
    if lacking := {online.text, race.text} - set(times_ms):
        return {"error": f"not timed: {', '.join(sorted(lacking))}"}
    return {
        "calls": calls,
        "seconds": numbers.significant(seconds, 4),
        "turns": online.total_samples,
        "candidates": len(online.ranking),
        "regret_bound": online.selection.evidence.regret_bound,
        "is_undecided": any("undecided" in r for r in online.selection.evidence.remarks),
        "race_tuning_ms": numbers.significant(race.tuning_ms, 4),
        "outcomes": {text: found for text, found in outcomes(online).items() if text in times_ms},
        **judged(online.text, race.text, times_ms),
    }


def outcomes(choice: Any) -> dict[str, str]:
    """Why each candidate was eliminated, by its text, and how often it was timed."""
    return {
        m.candidate.text: f"{m.eliminated or 'not eliminated'}; {m.samples} samples"
        for m in choice.selection.ranking
    }


def decide(call: Call, end: float) -> tuple[int, float]:
    """``(calls, seconds)`` until the trial is over, or until ``end``."""
    import torch

    from cudnn_autotune.online.tuner import TUNER

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


def contenders(choices: list[Any]) -> list[Any]:
    """What was chosen, and the fastest of each ranking."""
    found = {}
    for choice in choices:
        timed = [t for t in choice.selection.ranking if t.time_ms is not None and not t.runs]
        timed.sort(key=lambda t: t.time_ms)
        for entry in [choice.chosen, *timed[:_CONTENDERS]]:
            found.setdefault(entry.candidate.text, entry.candidate)
    return list(found.values())


def judged(online: str, race: str, times_ms: dict[str, float]) -> dict[str, Any]:
    """Regrets of what the two modes picked, as fractions: 0.01 is 1 % slower."""
    best = min(times_ms, key=times_ms.__getitem__)
    return {
        "picked": online,
        "race": race,
        "best": best,
        "times_ms": {text: numbers.significant(ms) for text, ms in times_ms.items()},
        "regret": numbers.significant(times_ms[online] / times_ms[best] - 1),
        "race_regret": numbers.significant(times_ms[race] / times_ms[best] - 1),
        "against_race": numbers.significant(times_ms[online] / times_ms[race] - 1),
    }
