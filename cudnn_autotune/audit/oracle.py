"""The long measurement that modes are judged by; it sees a ``sampling.Timer`` and nothing else.

1. Screening: every candidate once or twice; those far behind, and what shares an engine with
   something hopeless, are left out (some take 300 ms where the best takes 0.7).
2. A short race of the hopeful ones leaves the survivors, within 10 % of the best. What a mode
   picked is always among them.
3. Rounds: all survivors take turns in short batches, in random order, the next round mirrored
   (drift that is linear cancels), with cold operands and with hot ones.
4. On request, sustained runs: the leading ones alone until the clock is steady, in an order and
   then in its mirror image. By default only where a probe of the leader shows a clock below the
   highest: elsewhere a steady call takes what a short one does.

Times are paired: the logarithm of a time is a candidate's effect plus a round's effect plus
noise (median polish), and errors are those of a candidate's distance from the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.alone import Alone
from cudnn_autotune.audit.analysis import truth_of
from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Truth
from cudnn_autotune.audit.pairing import of_rounds
from cudnn_autotune.audit.turns import Turns
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Cache, Timer

_CACHES: dict[str, Cache] = {BURST_COLD: "cold", BURST_HOT: "hot"}


def measure(
    timer: Timer,
    candidates: Sequence[Candidate],
    picked: Collection[str] = (),
    settings: OracleSettings | None = None,
) -> Oracle:
    """Judges a case.

    Args:
        timer: of the case.
        candidates: all that could serve it, PyTorch's own path included.
        picked: texts of candidates that are measured to the end, however slow.

    Returns:
        Truths, or an ``Oracle`` with an ``error`` where no candidate runs. What the source raises
        (a lost device) is not caught.
    """
    begin = time.perf_counter()
    turns = Turns(timer, settings or OracleSettings(), picked)
    alone = Alone(turns)
    runnable = timer.runnable(candidates)
    for text in turns.picked - {c.text for c in runnable}:
        turns.failed[text] = "does not build, or its workspace cannot be had"
    hopeful = turns.screen(runnable)
    survivors = turns.race(hopeful) if hopeful else []
    truths = _bursts(turns, survivors)
    burst = truth_of(Oracle(truths), BURST)
    if burst is not None and turns.settings.solo != "never":
        sustained = alone.sustained(survivors, burst)
        if sustained is not None:
            truths[SUSTAINED] = sustained
    clocks = turns.clocks_mhz
    return Oracle(
        truths,
        candidates=len(candidates),
        failed=turns.failed,
        wall_ms=(time.perf_counter() - begin) * 1e3,
        clock_mhz=float(np.median(clocks)) if clocks else None,
        solo_clock_mhz=min(alone.clocks_mhz, default=None),
        max_clock_mhz=timer.state().max_clock_mhz,
        solo=turns.settings.solo,
        remarks=tuple(alone.remarks),
        error="" if truths else "no candidate runs",
    )


def _bursts(turns: Turns, candidates: Sequence[Candidate]) -> dict[str, Truth]:
    times = turns.interleaved(candidates, turns.settings.rounds, tuple(_CACHES.values()))
    if not all(times.values()):
        return {}
    return {name: of_rounds(times[cache]) for name, cache in _CACHES.items()}


def interleaved_ratios(
    timer: Timer, one: Candidate, other: Candidate, settings: OracleSettings
) -> dict[str, npt.NDArray[np.float64]]:
    """Truth -> time of ``one`` over that of ``other``, one ratio a round, in short batches.

    Both are runnable. Empty where one of them fails.
    """
    turns = Turns(timer, settings, (one.text, other.text))
    if len(turns.screen([one, other])) < 2:
        return {}
    times = turns.interleaved([one, other], settings.rounds, tuple(_CACHES.values()))
    if any(len(row) < 2 for row in times.values()):
        return {}
    return {
        name: np.array(times[cache][one.text]) / np.array(times[cache][other.text])
        for name, cache in _CACHES.items()
    }


def solo_ratio(
    timer: Timer, one: Candidate, other: Candidate, settings: OracleSettings
) -> tuple[float, float] | None:
    """``(ratio, relative error)`` of the steady times of two runnable candidates.

    None where one of them fails, or, unless ``settings.solo`` is ``always``, where the clock holds
    when the faster one runs alone.
    """
    turns = Turns(timer, settings, (one.text, other.text))
    if len(turns.screen([one, other])) < 2:
        return None
    burst = truth_of(Oracle(_bursts(turns, [one, other])), BURST)
    if burst is None or len(burst.times_ms) < 2:
        return None
    truth = Alone(turns).sustained([one, other], burst)
    if truth is None or len(truth.times_ms) < 2:
        return None
    return truth.times_ms[one.text] / truth.times_ms[other.text], max(truth.errors.values())
