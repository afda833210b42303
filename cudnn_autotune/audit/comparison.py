"""PyTorch's own call and our pick, taking turns in one process."""

from __future__ import annotations

import numpy as np

from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.audit.model import BURST_COLD, BURST_HOT, SUSTAINED, Ratio
from cudnn_autotune.audit.oracle import interleaved_ratios, solo_ratio
from cudnn_autotune.audit.pairing import relative_error
from cudnn_autotune.engines.configs import ATEN, Candidate, parse_engine_text
from cudnn_autotune.timers.timer import Timer


def against_pytorch(
    timer: Timer, reference: Candidate, settings: OracleSettings
) -> dict[str, Ratio]:
    """Truth -> time of PyTorch's call over that of ``reference``, which is runnable.

    The sustained ratio is there where ``settings.solo`` asks for it.

    Raises:
        RuntimeError: one of the two does not run.
    """
    if reference.text == ATEN.text:
        # PyTorch's own path is chosen only where it is none of cuDNN's: then PyTorch's flags change
        # nothing, and it is the same call.
        truths = [BURST_COLD, BURST_HOT, *([] if settings.solo == "never" else [SUSTAINED])]
        return dict.fromkeys(truths, Ratio(1.0, 1.0, 1.0))
    rows = interleaved_ratios(timer, ATEN, reference, settings)
    if not rows:
        raise RuntimeError(f"PyTorch's call or {reference.text} does not run")
    found = {}
    for truth, ratios in rows.items():
        low, median, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
        found[truth] = Ratio(median, low, high, relative_error(ratios))
    if settings.solo != "never":
        alone = solo_ratio(timer, ATEN, reference, settings)
        if alone is not None:
            ratio, error = alone
            found[SUSTAINED] = Ratio(ratio, ratio * (1 - error), ratio * (1 + error), error)
    return found


def candidate_of(text: str, known: list[Candidate]) -> Candidate:
    """The candidate of that text: one of ``known``, or an engine config that no heuristic lists.

    Raises:
        ValueError: a text that is neither.
    """
    for candidate in known:
        if candidate.text == text:
            return candidate
    engine, knobs = parse_engine_text(text)
    return Candidate(engine, knobs, 0, (), (), text, "", len(known))
