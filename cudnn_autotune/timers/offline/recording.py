"""``record``: measures a problem's candidates through a timer and keeps the raw samples.

In this order: screening (each candidate built and run once or twice); passes of cuDNN's own search;
interleaved rounds in random and then mirrored order, cold and hot; and long sustained runs of the
leading ones, each right after some rounds, as a strategy would run them.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping

from cudnn_autotune.core.versions import environment as this_environment
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.offline.recorder import Recorder
from cudnn_autotune.timers.offline.recording_format import ENVIRONMENT, Recording
from cudnn_autotune.timers.offline.recording_parts import (
    Reading,
    RecordedCandidate,
    Rounds,
    SoloTrace,
)
from cudnn_autotune.timers.timer import Timer

__all__ = [
    "ENVIRONMENT",
    "Reading",
    "RecordedCandidate",
    "Recording",
    "Rounds",
    "SoloTrace",
    "record",
]

_PASSES_SHARE = 0.3
_ROUNDS_SHARE = 0.6


def record(
    timer: Timer,
    candidates: Candidates,
    problem: ConvProblem,
    *,
    rounds: int = 40,
    solo: int = 6,
    solo_ms: float = 2500.0,
    batch_ms: float = 1.0,
    time_limit_ms: float = 20_000.0,
    seed: int = 0,
    environment: Mapping[str, str | int | float | None] | None = None,
) -> Recording:
    """Measures all candidates of ``problem``, PyTorch's own path included.

    A candidate whose first run takes more than 150 ms and ten times as long as the fastest so far,
    loading aside, is not run again; one that is three times slower than the fastest takes part in
    three rounds only. A candidate that fails is left out from there on.

    Args:
        timer: a fresh one.
        rounds: how often all take turns, cold and hot.
        solo: how many of the leading ones run alone (those within 25 % of the fastest).
        solo_ms: the longest sustained run; it ends earlier once time and clock are steady.
        batch_ms: how long a candidate's turn in a round is, about.
        time_limit_ms: wall time, plan building included; what cannot be afforded is left out, and
            a remark says so. Screening stops at it, cuDNN's search at 30 %, the rounds at
            60 % of it; one pass and one round are always measured.
        seed: of the order.
        environment: added to, or instead of, what ``cudnn_autotune.environment()`` finds.

    Returns:
        What was measured; if the timer raises RuntimeError (device lost, out of memory) after the
        first round, what was measured until then.

    Raises:
        ValueError: an argument out of its range, or no candidate at all.
        RuntimeError: the timer's, before the first round was complete.
    """
    for name, value in (("rounds", rounds), ("solo", solo)):
        least = 1 if name == "rounds" else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an int of {least} or more, got {value!r}")
    for name, number in (
        ("solo_ms", solo_ms),
        ("batch_ms", batch_ms),
        ("time_limit_ms", time_limit_ms),
    ):
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be finite and above 0, got {number!r}")
    every = [*candidates.all(), *candidates.beyond()]
    if not every:
        raise ValueError("candidates must not be empty")
    recorder = Recorder(timer, every, batch_ms, time_limit_ms, seed)
    recorder.screen()
    try:
        recorder.run_passes(time_limit_ms * _PASSES_SHARE)
        recorder.run_rounds(rounds, time_limit_ms * (_ROUNDS_SHARE if solo else 1))
        recorder.run_solo(solo, solo_ms)
    except RuntimeError as error:
        if not recorder.complete_rounds and recorder.runs:
            raise
        recorder.remarks.append(f"stopped by {type(error).__name__}: {error}")
    found = {**dict.fromkeys(ENVIRONMENT), **this_environment()}
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return recorder.recording({**found, **(environment or {})}, problem, candidates)
