"""What a worker of compare_sampling.py does with each case; one process, one task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import numbers
from common.convolution import Case, from_described

# An engine whose first config is this much slower than the best is not looked at further:
# configs of one engine are slow together, and some take hundreds of milliseconds.
HOPELESS = 8.0
# No scouting of a case beyond this; what is left unmeasured counts as the slowest seen.
SCOUT_LIMIT_S = 2.0
# Consecutive failures after which a process gives up (a CUDA error poisons its context).
GIVE_UP_AFTER = 3


def backend_for(device: str) -> Any:
    if device == "cuda":
        from .cuda_backend import CudaBackend

        return CudaBackend()
    from .cpu_backend import CpuBackend

    return CpuBackend()


def scout(backend: Any, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Rough times of all candidates without ever spending long on a slow engine.

    The first config of each engine alone, once; then, for the engines that are not hopeless, all
    configs in three short rounds.
    """
    begin = time.monotonic()
    candidates: Sequence[tuple[str, int]] = backend.candidates(case)
    leaders: dict[int, float] = {}
    failed: dict[str, str] = {}
    rough: dict[str, float] = {}
    for text, engine in candidates:
        if engine in leaders or time.monotonic() - begin > SCOUT_LIMIT_S:
            continue
        times, bad = backend.measure(case, [text], rounds=1, target_ms=0.01, cache="hot")
        failed.update(bad)
        if text in times:
            leaders[engine] = rough[text] = numbers.median(times[text])
    if not rough:
        return {"error": "no candidate runs", "failed": failed, "candidates": len(candidates)}
    best = min(leaders.values())
    hopeful = [
        text
        for text, engine in candidates
        if text not in failed and leaders.get(engine, HOPELESS * best) < HOPELESS * best
    ]
    times, bad = backend.measure(
        case,
        hopeful,
        rounds=options["scout_rounds"],
        target_ms=options["scout_target_ms"],
        cache=options["cache"],
    )
    failed.update(bad)
    rough.update({text: numbers.median(values) for text, values in times.items()})
    slowest = max(leaders.values())
    estimated = [
        rough.get(text, leaders.get(engine, slowest))
        for text, engine in candidates
        if text not in failed
    ]
    return {
        "candidates": len(candidates),
        # In the heuristics' order.
        "rough_ms": {t: numbers.significant(rough[t], 4) for t, _ in candidates if t in rough},
        "failed": failed,
        # GPU time that one launch of every candidate takes: what sampling is made of.
        "sweep_ms": numbers.significant(sum(estimated), 4),
        "first_ten_ms": numbers.significant(sum(estimated[:10]), 4),
        "seconds": numbers.significant(time.monotonic() - begin, 3),
    }


def oracle(backend: Any, case: Case, options: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """All `texts` side by side in many interleaved rounds; the raw times, one a round."""
    begin = time.monotonic()
    times, failed = backend.measure(
        case,
        texts,
        rounds=options["rounds"],
        target_ms=options["target_ms"],
        cache=options["cache"],
    )
    return {
        "times_ms": {text: numbers.all_significant(values, 5) for text, values in times.items()},
        "failed": failed,
        "seconds": numbers.significant(time.monotonic() - begin, 3),
    }


def run(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: yields {"case": id, "result": ...} or {"case": id, "error": ...}."""
    options = request["options"]
    end = time.monotonic() + request["seconds"]
    backend = backend_for(request["device"])
    backend.prepare()
    in_a_row = 0
    for entry in request["cases"]:
        if time.monotonic() > end:
            return
        case = from_described(entry["case"])
        try:
            if request["task"] == "scout":
                result = scout(backend, case, options)
            elif request["task"] == "oracle":
                result = oracle(backend, case, options, entry["texts"])
            elif request["task"] == "pytorch":
                result = backend.torch_against(
                    case,
                    request["mode"],
                    options["reference"],
                    rounds=options["torch_rounds"],
                    target_ms=options["target_ms"],
                )
            else:
                result = backend.pick(case, request["mode"])
        except Exception as error:  # the other cases still count; the record names this one
            in_a_row += 1
            yield {"case": case.id, "result": {"error": f"{type(error).__name__}: {error}"}}
            if in_a_row >= GIVE_UP_AFTER:
                raise
            continue
        in_a_row = 0
        yield {"case": case.id, "result": result}
