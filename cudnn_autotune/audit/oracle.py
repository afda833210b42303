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

It shares no elimination and no sustained run with ``sampling``: the oracle must not inherit the
bugs of the modes that it judges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cudnn_autotune.audit.judged_turns import (
    CACHE_OF,
    ROUNDS,
    JudgedTurns,
    OracleSettings,
    of_rounds,
    relative_error,
)
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Ratio, Truth
from cudnn_autotune.audit.summary import truth_of
from cudnn_autotune.audit.sustained_runs import SustainedRuns
from cudnn_autotune.expert import OWN_PATH, Candidate, named
from cudnn_autotune.sampling import Cache, Timer


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
    runs = SustainedRuns(turns)
    runnable = timer.runnable(candidates)
    for text in turns.picked - {c.text for c in runnable}:
        turns.failed[text] = "does not build, or its workspace cannot be had"
    survivors = turns.race(turns.screen(runnable))
    truths = burst_truths(turns.interleaved(survivors, ROUNDS))
    burst = truth_of(Oracle(truths), BURST)
    if burst is not None and turns.settings.solo != "never":
        sustained = runs.truth(survivors, burst)
        if sustained is not None:
            truths[SUSTAINED] = sustained
    return Oracle(
        truths,
        candidates=len(candidates),
        failed=turns.failed,
        solo=turns.settings.solo,
        remarks=tuple(runs.remarks),
        error="" if truths else "no candidate runs",
    )


def burst_truths(times: Mapping[Cache, dict[str, list[float]]]) -> dict[str, Truth]:
    """Returns the truths from rounds, by name; empty if no candidate ran in all rounds."""
    if not all(times.values()):
        return {}
    return {name: of_rounds(times[cache]) for name, cache in CACHE_OF.items()}


def against_pytorch(
    timer: Timer, reference: Candidate, settings: OracleSettings
) -> dict[str, Ratio]:
    """Measures the time of PyTorch's call over that of ``reference``, which is runnable.

    Returns ratios by truth; the sustained one only if ``settings.solo`` wants it. Raises
    RuntimeError if one of the two does not run."""
    if reference.text == OWN_PATH.text:
        # PyTorch's own path is chosen only if it does not use cuDNN. Then PyTorch's cuDNN flags
        # have no effect, and both calls are the same.
        truths = [BURST_COLD, BURST_HOT, *([] if settings.solo == "never" else [SUSTAINED])]
        return dict.fromkeys(truths, Ratio(1.0, 1.0, 1.0))
    pair = [OWN_PATH, reference]
    turns = JudgedTurns(timer, settings, [c.text for c in pair])
    times = turns.interleaved(turns.screen(pair), ROUNDS)
    if any(len(row) < 2 for row in times.values()):
        raise RuntimeError(f"PyTorch's call or {reference.text} does not run")
    found = {}
    for name, cache in CACHE_OF.items():
        ratios = np.array(times[cache][OWN_PATH.text]) / np.array(times[cache][reference.text])
        low, median, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
        found[name] = Ratio(median, low, high, relative_error(ratios))
    burst = truth_of(Oracle(burst_truths(times)), BURST)
    if burst is not None and settings.solo != "never":
        sustained = SustainedRuns(turns).truth(pair, burst)
        if sustained is not None and len(sustained.times_ms) == len(pair):
            ratio = sustained.times_ms[OWN_PATH.text] / sustained.times_ms[reference.text]
            error = max(sustained.errors.values())
            found[SUSTAINED] = Ratio(ratio, ratio * (1 - error), ratio * (1 + error), error)
    return found


def candidate_of(text: str, known: list[Candidate]) -> Candidate:
    """Returns the candidate of that text: one of ``known``, or a config that no heuristic lists.
    Raises ValueError if it is neither."""
    listed = next((candidate for candidate in known if candidate.text == text), None)
    return listed or named(text, len(known))
