"""Which candidates are worth running alone: the leaders of short rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

# Engines further behind than this in bursts do not win alone: they differ in power by less.
REACH = 1.2
_SURVIVORS = 12


def raced(timer: Any, known: Sequence[Any], picked: Collection[str] = ()) -> tuple[Any, list[Any]]:
    """(``audit.turns.Turns``, the survivors of its race, fastest first).

    Raises:
        RuntimeError: no candidate runs.
    """
    from cudnn_autotune.audit.config import OracleSettings
    from cudnn_autotune.audit.turns import Turns

    turns = Turns(timer, OracleSettings(within=REACH, survivors=_SURVIVORS), picked)
    survivors = turns.race(turns.screen(timer.runnable(known)))
    if not survivors:
        raise RuntimeError("no candidate runs")
    return turns, survivors


def leaders(
    order: Sequence[str], by_text: dict[str, Any], times_ms: dict[str, float], most: int
) -> list[str]:
    """Those that could win alone: the fastest of each engine first, since configs of one engine
    mostly draw alike; then the others within reach, as they finished."""
    best = times_ms[order[0]]
    near = [text for text in order if times_ms[text] <= REACH * best]
    seen: set[Any] = set()
    firsts = []
    for text in near:
        if by_text[text].engine not in seen:
            seen.add(by_text[text].engine)
            firsts.append(text)
    firsts = firsts[: max(1, most * 2 // 3)]  # the winner's own engine may have a calmer config
    return [*firsts, *(text for text in near if text not in firsts)][:most]
