"""The worker of board_power.py: one layer in one direction, its leaders alone in blocks."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from common import numbers
from common.leading import leaders, raced
from common.sources import Source, failure, fast_listed, source_of

_BATCH_MS = 5.0
_MOST_CALLS = 500
_LEAST_BATCHES = 4
_WARM_UP_S = 0.3


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ``board``, then one ``block`` a block, then ``finished``; ``failed`` for a step or a
    candidate that failed."""
    try:
        yield from blocks(source_of(request), request)
    except Exception as error:  # a layer that fails is recorded, and the next one has its turn
        yield {"part": "failed", "step": "blocks", "error": failure(error)}


def blocks(source: Source, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    timer, candidates = source.open()
    try:
        turns, survivors = raced(timer, fast_listed(candidates))
        by_text = {c.text: c for c in survivors}
        call_ms = {text: turns.rough_ms[text] for text in by_text}
        chosen = leaders(list(by_text), by_text, call_ms, request["leaders"])
        board = timer.state()
        yield {
            "part": "board",
            "power_limit_w": board.power_limit_w,
            "max_clock_mhz": board.max_clock_mhz,
        }
        calls = {text: calls_of(call_ms[text]) for text in chosen}
        run(timer, by_text[chosen[0]], calls[chosen[0]], call_ms[chosen[0]], _WARM_UP_S)
        order = random.Random(0)
        for kind, rounds, seconds in (
            ("short", request["blocks"], request["block_s"]),
            ("long", request["long_blocks"], request["long_s"]),
        ):
            for text in in_turns(chosen, rounds, order):
                if text not in calls:
                    continue
                block = run(timer, by_text[text], calls[text], call_ms[text], seconds)
                if "error" in block:
                    del calls[text]
                    yield {"part": "failed", "step": text, **block}
                    continue
                call_ms[text] = statistics.fmean(block["times_ms"])
                yield {"part": "block", "text": text, "kind": kind, "calls": calls[text], **block}
        if not calls:
            raise RuntimeError("every candidate failed alone")
        yield {"part": "finished"}
    finally:
        source.close(timer)


def calls_of(call_ms: float) -> int:
    """Of a batch."""
    return max(1, min(math.ceil(_BATCH_MS / max(call_ms, 1e-4)), _MOST_CALLS))


def in_turns(texts: Sequence[str], rounds: int, order: random.Random) -> Iterator[str]:
    """Every text once a round: shuffled, then the same mirrored, and so on."""
    row = list(texts)
    for index in range(rounds):
        if index % 2 == 0:
            order.shuffle(row)
        else:
            row.reverse()
        yield from row


def run(timer: Any, candidate: Any, calls: int, call_ms: float, seconds: float) -> dict[str, Any]:
    """A block: ``candidate`` alone for about ``seconds``, hot, without a pause; what its batches
    took, and the clock and the power that were read in them."""
    from cudnn_autotune.timers.timer import Batch

    count = max(_LEAST_BATCHES, round(seconds * 1e3 / (calls * call_ms)))
    samples = timer.run([Batch(candidate, calls, "hot")] * count)
    wrong = next((s for s in samples if not math.isfinite(s.time_ms)), None)
    if wrong is not None:
        return {"error": wrong.error or "fails to run"}
    return {
        "times_ms": numbers.all_significant((s.time_ms for s in samples), 6),
        "clocks_mhz": numbers.all_significant(s.clock_mhz for s in samples),
        "powers_w": numbers.all_significant((s.power_w for s in samples), 6),
    }
