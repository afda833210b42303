"""What a case costs an audit's process, about: a session shares out its time by it."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_autotune.audit.model import PYTORCH_MODES
from cudnn_autotune.audit.oracle_settings import Solo
from cudnn_autotune.audit.plan import Step

START_S = 6.0
"""Of a process, before its first case."""
# Of a case, in seconds; an H200's.
_GUESSES = {
    "heuristic": 0.05,
    "auto": 1.0,
    "sustained": 5.0,
    "oracle": 1.0,
    **dict.fromkeys(PYTORCH_MODES, 0.5),
}
_OTHER_MODE = 0.6
# More where steady times are wanted, and most cases throttle.
_SUSTAINED = {"oracle": 5.0, **dict.fromkeys(PYTORCH_MODES, 3.5)}


def seconds_of_case(step: Step, known: Mapping[str, float], solo: Solo) -> float:
    """Wall seconds of one case, as earlier ones took, or by a guess.

    Args:
        known: mode, or ``oracle`` -> seconds, of a session before this one or of its first cases.
        solo: when the oracle measures steady times.
    """
    if step.mode in known:
        return known[step.mode]
    guess = _GUESSES.get(step.mode, _OTHER_MODE)
    return guess if solo == "never" else guess + _SUSTAINED.get(step.mode, 0.0)
