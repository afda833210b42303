"""Times PyTorch's own call and our pick in turns, in one process."""

from __future__ import annotations

import numpy as np

from cudnn_autotune.audit.alone import Alone
from cudnn_autotune.audit.analysis import truth_of
from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.audit.judging import ROUNDS, JudgedTurns
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Ratio
from cudnn_autotune.audit.oracle import CACHE_OF, burst_truths
from cudnn_autotune.audit.pairing import relative_error
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.listing import named
from cudnn_autotune.timers.timer import Timer


def against_pytorch(
    timer: Timer, reference: Candidate, settings: OracleSettings
) -> dict[str, Ratio]:
    """Measures the time of PyTorch's call over that of ``reference``, which is runnable.

    Returns ratios by truth; the sustained one only if ``settings.solo`` wants it. Raises
    RuntimeError if one of the two does not run."""
    if reference.text == ATEN.text:
        # PyTorch's own path is chosen only if it does not use cuDNN. Then PyTorch's cuDNN flags
        # have no effect, and both calls are the same.
        truths = [BURST_COLD, BURST_HOT, *([] if settings.solo == "never" else [SUSTAINED])]
        return dict.fromkeys(truths, Ratio(1.0, 1.0, 1.0))
    pair = [ATEN, reference]
    turns = JudgedTurns(timer, settings, [c.text for c in pair])
    times = turns.interleaved(turns.screen(pair), ROUNDS)
    if any(len(row) < 2 for row in times.values()):
        raise RuntimeError(f"PyTorch's call or {reference.text} does not run")
    found = {}
    for name, cache in CACHE_OF.items():
        ratios = np.array(times[cache][ATEN.text]) / np.array(times[cache][reference.text])
        low, median, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
        found[name] = Ratio(median, low, high, relative_error(ratios))
    burst = truth_of(Oracle(burst_truths(times)), BURST)
    if burst is not None and settings.solo != "never":
        alone = Alone(turns).sustained(pair, burst)
        if alone is not None and len(alone.times_ms) == len(pair):
            ratio = alone.times_ms[ATEN.text] / alone.times_ms[reference.text]
            error = max(alone.errors.values())
            found[SUSTAINED] = Ratio(ratio, ratio * (1 - error), ratio * (1 + error), error)
    return found


def candidate_of(text: str, known: list[Candidate]) -> Candidate:
    """Returns the candidate of that text: one of ``known``, or a config that no heuristic lists.
    Raises ValueError if it is neither."""
    listed = next((candidate for candidate in known if candidate.text == text), None)
    return listed or named(text, len(known))
