"""What the first call of a layer costs, from an idle GPU until its output is there."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from common import numbers

from .problems import Call, our_call, warm_up


def wall_ms(call: Call) -> float:
    import torch

    gc.collect()  # the rubbish of the calls before is not this one's
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker, a process of one mode: one record a layer. Nothing of the layers has run before:
    kernels are loaded, plans built."""
    from cudnn_autotune.audit.layers import Case
    from cudnn_autotune.timers.measuring import operands

    mode = request["mode"]
    warm_up()
    problems = {name: Case(**case).problem() for name, case in request["cases"].items()}
    data = {name: operands(problem) for name, problem in problems.items()}
    for name, problem in problems.items():
        call = our_call(problem, data[name], mode)
        yield {
            "case": name,
            "mode": mode,
            "first_ms": numbers.significant(wall_ms(call)),
            "second_ms": numbers.significant(wall_ms(call)),
        }


def compared(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By case: first calls in ms of both modes, and the ratio of their medians."""
    result: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(r["case"] for r in records):
        of_mode = {
            mode: [r["first_ms"] for r in records if (r["case"], r["mode"]) == (name, mode)]
            for mode in ("heuristic", "online")
        }
        if not all(of_mode.values()):
            continue
        medians = {mode: numbers.median(times) for mode, times in of_mode.items()}
        result[name] = {
            "first_ms": of_mode,
            "processes": min(map(len, of_mode.values())),
            "ratio": numbers.significant(medians["online"] / medians["heuristic"]),
        }
    return result
