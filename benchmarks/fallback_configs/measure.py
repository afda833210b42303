"""What mode FALLBACK lists for one problem, against mode A and the first of mode B."""

from __future__ import annotations

import dataclasses
from typing import Any

from common import numbers
from common.turns import single_calls, take_turns

TENSOR_CORE = "TENSOR_CORE"
FIRST_OF_B = 4
# Of what does without tensor cores one launch may take a second: only run where it cannot.
MOST_FLOPS = 5e9
NEAR = 1.5


@dataclasses.dataclass(frozen=True)
class Settings:
    rivals: int = 3
    """Of the others, the fastest of single calls: they take turns with what is near."""
    rounds: int = 8
    """A multiple of 4."""


def measure(timer: Any, candidates: Any, settings: Settings | None = None) -> dict[str, Any]:
    """Milliseconds a call.

    Returns:
        ``others``: how many of mode A and the first of B ran; ``best``: the fastest by its text and
        ``best_ms``, by single calls; ``configs``: of each config of mode FALLBACK its ``text``,
        ``engine``, whether it uses tensor cores (``tensor_core``) and is ``compiled`` at run time,
        how long it took to build (``build_ms``), and its
        ``outcome``: ``timed`` with its time over the best's by single calls (``rough``), and, where
        that is below 1.5, in rounds that take turns (``ratio``), or ``refused``, ``dropped``
        (it fails, or a call takes more than ``turns.TOO_SLOW_MS``), ``not run``.

    Raises:
        ValueError: none of the others runs.
    """
    settings = settings or Settings()
    listed = {c.text: c for c in [*candidates.of_mode("B")[:FIRST_OF_B], *candidates.of_mode("A")]}
    others = timer.runnable([c for c in listed.values() if not c.is_compiled])
    rough = single_calls(timer, others)
    rivals = sorted((c for c in others if c.text in rough), key=lambda c: rough[c.text])
    rivals = rivals[: settings.rivals]
    if not rivals:
        raise ValueError("nothing of mode A and the first of B that needs no compilation runs")
    flops = candidates.work.flops if candidates.work is not None else 0.0
    best_ms = rough[rivals[0].text]
    configs: list[dict[str, Any]] = []
    near = []
    for config in candidates.of_mode("FALLBACK"):
        told = {
            "text": config.text,
            "engine": config.engine,
            "tensor_core": TENSOR_CORE in config.numerical_notes,
            "compiled": config.is_compiled,
        }
        configs.append(told)
        if not told["tensor_core"] and flops > MOST_FLOPS:
            told["outcome"] = "not run"
            continue
        begin_ms = timer.elapsed_ms()
        built = timer.runnable([config])
        told["build_ms"] = numbers.significant(timer.elapsed_ms() - begin_ms, 3)
        found = single_calls(timer, built)
        if not found:
            told["outcome"] = "dropped" if built else "refused"
            continue
        rough |= found
        told |= {"outcome": "timed", "rough": numbers.significant(rough[config.text] / best_ms, 4)}
        if rough[config.text] <= NEAR * best_ms:
            near.append((config, told))
    if near:
        racing = [*rivals, *(config for config, _ in near)]
        times = take_turns(timer, racing, rough, rounds=settings.rounds)
        best = min(times[c.text] for c in rivals if c.text in times)
        for config, told in near:
            if config.text in times:
                told["ratio"] = numbers.significant(times[config.text] / best, 5)
    return {
        "others": len(others),
        "best": rivals[0].text,
        "best_ms": numbers.significant(best_ms),
        "configs": configs,
    }
