"""The host's cost of a call while `online` is undecided, against `heuristic`'s decided one."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from call_overhead.calls import enqueue_us
from common import numbers

from .problems import Call, made, tiny, warm_up

MODES = ("heuristic", "online")
PHASES = ("preparing", "undecided")
# By then the tuner's thread has recorded the time of its last step.
_LAST_STEP_S = 0.02


def phase() -> str:
    from cudnn_autotune.online.tuner import TUNER

    return "preparing" if TUNER.preparing else "undecided" if TUNER.undecided else "decided"


def trial(calls: dict[str, Call], per_block: int, end: float) -> Iterator[tuple[str, float, float]]:
    """Blocks of one trial in turns: ``(phase, heuristic's us, online's us)``.

    While calls have preparation to do, which are few and differ, a block is one call. A block that
    began in one phase and ended in another is left out.
    """
    block = 0
    while time.monotonic() < end:
        before = phase()
        if before == "decided":
            return
        order = MODES if block % 2 else MODES[::-1]
        size = 1 if before == "preparing" else per_block
        us = {mode: enqueue_us(calls[mode], size, "cuda") for mode in order}
        if phase() == before:
            yield before, us["heuristic"], us["online"]
        block += 1


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record a trial, each after a ``forget()``."""
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.online.tuner import TUNER
    from cudnn_autotune.timers.measuring import operands

    per_block = request["calls"]
    end = time.monotonic() + request["seconds"]
    warm_up()
    problem = tiny("fprop")
    data = operands(problem)
    # Without a function of Python around the operator, which would count.
    operator, (x, w, _) = torch.ops.cudnn_autotune.conv_fprop, data
    shape = (problem.stride, problem.padding, problem.dilation, problem.groups)
    calls = {mode: partial(operator, x, w, None, *shape, mode, -1) for mode in MODES}
    gc.collect()
    gc.disable()  # a collection inside a block would be charged to one of the timed calls
    for _ in range(request["trials"]):
        if time.monotonic() > end:
            return
        ca.forget()
        for _ in range(per_block):
            calls["heuristic"]()
        quiet = [enqueue_us(calls["heuristic"], per_block, "cuda") for _ in range(20)]
        before_s = TUNER.cpu_s
        calls["online"]()  # starts the trial
        torch.cuda.synchronize()
        found = list(trial(calls, per_block, end))
        time.sleep(_LAST_STEP_S)
        decided = made(problem, "online")
        record: dict[str, Any] = {
            "quiet_us": numbers.all_significant(quiet),
            "tuner_cpu_us": numbers.significant((TUNER.cpu_s - before_s) * 1e6),
            "turns": decided.total_samples if decided else 0,
        }
        for name in PHASES:
            record[name] = {
                mode: numbers.all_significant([block[i] for block in found if block[0] == name])
                for i, mode in enumerate(MODES, 1)
            }
        yield record


def compared(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Per call, in us: both modes' times, and online's less heuristic's, block by block and
    against heuristic's where no trial was under way at all."""
    result: dict[str, Any] = {}
    for name in PHASES:
        heuristic = [us for r in records for us in r[name]["heuristic"]]
        online = [us for r in records for us in r[name]["online"]]
        if not online:
            continue
        paired = [a - b for a, b in zip(online, heuristic, strict=True)]
        alone = [us - numbers.median(r["quiet_us"]) for r in records for us in r[name]["online"]]
        spreads = {
            "heuristic_us": heuristic,
            "online_us": online,
            "difference_us": paired,
            "difference_to_quiet_us": alone,
        }
        result[name] = {key: summary(values) for key, values in spreads.items()}
    quiet = [us for r in records for us in r["quiet_us"]]
    if quiet:
        result["quiet_us"] = summary(quiet)
    turns = sum(r["turns"] for r in records)
    if turns:
        cpu_us = math.fsum(r["tuner_cpu_us"] for r in records)
        result["tuner_cpu_us_a_turn"] = numbers.significant(cpu_us / turns)
    return result


def summary(values: list[float]) -> dict[str, float | None]:
    """The spread, and the mean: what costs much and seldom is in no median."""
    mean = math.fsum(values) / len(values)
    return {**numbers.spread(values), "mean": numbers.significant(mean)}
