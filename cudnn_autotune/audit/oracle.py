"""The long measurement by which modes are judged; it uses only a ``timers.timer.Timer``.

1. Screening: every candidate runs once or twice. Those far behind are left out, and so are other
   configs of an engine whose configs are far slower (some take 300 ms where the best takes 0.7).
2. A short race of the others leaves the survivors, within 10 % of the best. A picked candidate
   always survives.
3. Rounds: all survivors take turns in short batches, in random order, the next round mirrored
   (drift that is linear cancels), with cold operands and with hot ones.
4. On request, sustained runs: the leading ones run alone until the clock is steady, in one order
   and then in its mirror image. By default they do so only if a probe of the leader shows a clock
   below the highest: elsewhere a steady call takes what a short one does.

Times are paired: the logarithm of a time is a candidate's effect plus a round's effect plus
noise (median polish), and errors are those of a candidate's distance from the fastest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cudnn_autotune.audit.alone import Alone
from cudnn_autotune.audit.analysis import truth_of
from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.audit.judging import ROUNDS, JudgedTurns
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Truth
from cudnn_autotune.audit.pairing import of_rounds
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Cache, Timer

CACHE_OF: dict[str, Cache] = {BURST_COLD: "cold", BURST_HOT: "hot"}


def measure(
    timer: Timer,
    candidates: Sequence[Candidate],
    picked: Collection[str] = (),
    settings: OracleSettings | None = None,
) -> Oracle:
    """Judges a case, given all its candidates, PyTorch's own path included. Those whose texts are
    in ``picked`` are measured to the end, however slow.

    If no candidate runs, the ``Oracle`` has an ``error``. What the timer raises (a lost device) is
    not caught.
    """
    turns = JudgedTurns(timer, settings or OracleSettings(), picked)
    alone = Alone(turns)
    runnable = timer.runnable(candidates)
    for text in turns.picked - {c.text for c in runnable}:
        turns.failed[text] = "does not build, or its workspace cannot be had"
    survivors = turns.race(turns.screen(runnable))
    truths = burst_truths(turns.interleaved(survivors, ROUNDS))
    burst = truth_of(Oracle(truths), BURST)
    if burst is not None and turns.settings.solo != "never":
        sustained = alone.sustained(survivors, burst)
        if sustained is not None:
            truths[SUSTAINED] = sustained
    return Oracle(
        truths,
        candidates=len(candidates),
        failed=turns.failed,
        solo=turns.settings.solo,
        remarks=tuple(alone.remarks),
        error="" if truths else "no candidate runs",
    )


def burst_truths(times: Mapping[Cache, dict[str, list[float]]]) -> dict[str, Truth]:
    """Returns the truths from rounds, by name; empty if no candidate ran in all rounds."""
    if not all(times.values()):
        return {}
    return {name: of_rounds(times[cache]) for name, cache in CACHE_OF.items()}
