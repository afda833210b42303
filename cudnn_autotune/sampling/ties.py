"""The rule that chooses among about equally fast candidates, so that repeated searches agree.

Candidates that are as fast as the fastest are equal, and a fixed order decides between them, not
their times: those change from one search to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cudnn_autotune.engines.configs import Candidate

# Candidates within this relative distance of the fastest are equally fast: processes differ by
# more.
TIE_WIDTH = 0.01
# Standard errors of a difference that are added to it: what noise alone may cause is equal, too.
_ERRORS = 0.5
WIDEST = 0.015
"""The largest relative distance of candidates that count as equal, however noisy the board."""

Keys = tuple[object, ...]

_ADVANTAGES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("an engine of cuDNN", lambda c: c.engine is None),
    ("one kernel", lambda c: c.is_unfused),
    ("less workspace", lambda c: c.workspace_bytes),
    ("earlier in cuDNN's list", lambda c: c.place),
    ("the first by name", lambda c: c.text),
)
_PYTORCHS = "PyTorch's choice"
_RULES = (
    f"not slower than {_PYTORCHS}",
    "deterministic",
    _PYTORCHS,
    *(name for name, _ in _ADVANTAGES),
)


def width(error: float) -> float:
    """Returns the distance (log) to the fastest up to which candidates are equal.

    Args:
        error: the standard error of the difference (log) of two candidates.
    """
    return min(TIE_WIDTH + _ERRORS * error, WIDEST)


def preference(candidate: Candidate, pytorchs: str) -> Keys:
    """Returns the key of a candidate in the fixed order: the least one is preferred.

    Args:
        pytorchs: text of the candidate that PyTorch would run; empty if that is unknown.
    """
    varies = "NONDETERMINISTIC" in candidate.numerical_notes
    return (varies, candidate.text != pytorchs, *(key(candidate) for _, key in _ADVANTAGES))


def break_ties(times: Mapping[Candidate, float], pytorchs: str = "") -> tuple[list[Candidate], str]:
    """Sorts tied candidates by preference, and names the rule that decided.

    A candidate that was slower than PyTorch's choice ranks behind it.

    Args:
        times: the time of each tied candidate, in any unit.
        pytorchs: as of :func:`preference`.

    Returns:
        The candidates, the preferred one first, and the rule: ``fastest`` if there is only one.
    """
    most = min((time for c, time in times.items() if c.text == pytorchs), default=None)

    def keys(candidate: Candidate) -> Keys:
        is_slower = most is not None and times[candidate] > most
        return (is_slower, *preference(candidate, pytorchs))

    ordered = sorted(times, key=keys)
    if len(ordered) < 2:
        return ordered, "fastest"
    # The decisive rule is the last one needed to separate the first from all others.
    first, *others = map(keys, ordered)
    decisive = max(_first_difference(first, other) for other in others)
    if decisive == 0 and ordered[0].text == pytorchs:
        decisive = _RULES.index(_PYTORCHS)
    return ordered, f"tie: {_RULES[decisive]}"


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one) - 1)
