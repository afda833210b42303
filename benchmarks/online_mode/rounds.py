"""Single calls of some candidates in rounds of random order, each between two events.

idle     each launched to an idle GPU.
queued   all of a round are enqueued before the GPU may start.
second   as `queued`, but each runs twice in a row, and the second one is timed.
batch    as `queued`, but each runs eight times in a row, and their mean is taken.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from .problems import Call

ROUND_ARMS = ("idle", "queued", "second", "batch")
# (calls before the first event, calls between the events) of an arm whose rounds are enqueued.
QUEUED = {"queued": (0, 1), "second": (1, 1), "batch": (0, 8)}
ROUNDS = 100
# Longer than the host takes to enqueue a round; 1.5 ms at 2 GHz.
_HELD_CYCLES = 3_000_000

Times = dict[str, list[float]]


def runners(problem: Any, data: Any, plans: dict[str, Any]) -> dict[str, Call]:
    """Without the operator around them: a call costs the host a few microseconds."""
    from cudnn_autotune import _C
    from cudnn_autotune.engines.unlisted import MATMUL

    native = problem.native()
    found: dict[str, Call] = {}
    for text, plan in plans.items():
        if plan is not None:
            found[text] = partial(_C.execute, plan, *data)
        elif text == MATMUL.text:
            found[text] = partial(_C.run_matmul, native, *data)
        else:
            found[text] = partial(_C.run_aten, native, *data)
    return found


def rounds_of(calls: dict[str, Call], arm: str, source: random.Random) -> Times:
    """Rounds of random order. Rounds that the GPU began before the host had enqueued them all are
    left out, except of ``idle``."""
    import torch

    times: Times = {text: [] for text in calls}
    before, timed = QUEUED.get(arm, (0, 1))
    events = {text: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for text in calls}
    held = torch.cuda.Event()
    for _ in range(ROUNDS):
        if arm != "idle":
            torch.cuda._sleep(_HELD_CYCLES)
            held.record()
        for text in source.sample(list(calls), len(calls)):
            if arm == "idle":
                torch.cuda.synchronize()
            begin, end = events[text]
            for _ in range(before):
                calls[text]()
            begin.record()
            for _ in range(timed):
                calls[text]()
            end.record()
        is_early = arm != "idle" and held.query()
        torch.cuda.synchronize()
        if not is_early:
            for text, (begin, end) in events.items():
                times[text].append(begin.elapsed_time(end) / timed)
    return times
