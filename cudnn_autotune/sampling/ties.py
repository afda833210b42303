"""Who is taken among candidates that are as good as equally fast, and how an outcome is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cudnn_autotune.engines.configs import Candidate

# Candidates within this of the fastest (relative) are equally fast: less than what one process
# differs from the next by.
TIE_WIDTH = 0.005
# What differs by less than this no measurement tells apart: cuDNN's order decides, so that runs
# agree. Else time does: in 3 of 24 ties that its order had decided on H200s the other one, measured
# as 0.3 to 0.5 % faster, was faster by 1.4 to 2.3 %.
_UNTOLD = 0.002

_ADVANTAGES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("deterministic", lambda c: "NONDETERMINISTIC" in c.numerical_notes),
    ("an engine of cuDNN", lambda c: c.engine is None),
    ("less workspace", lambda c: c.workspace_bytes),
)
_RULES = (
    *(name for name, _ in _ADVANTAGES),
    "faster",
    "earlier in cuDNN's list",
    "the first by name",
)


def break_ties(times: Mapping[Candidate, float]) -> tuple[list[Candidate], str]:
    """The tied, the one to take first, and what decided: ``fastest`` where there is one only.

    Args:
        times: of each of the tied, in any unit.
    """
    advantages = {c: tuple(key(c) for _, key in _ADVANTAGES) for c in times}
    least: dict[object, float] = {}
    for candidate, time in times.items():
        alike = advantages[candidate]
        least[alike] = min(time, least.get(alike, time))

    def keys(candidate: Candidate) -> tuple[object, ...]:
        alike, time = advantages[candidate], times[candidate]
        is_behind = time > (1 + _UNTOLD) * least[alike]
        return (*alike, time if is_behind else 0.0, candidate.place, candidate.text)

    ordered = sorted(times, key=keys)
    if len(ordered) < 2:
        return ordered, "fastest"
    # The last rule that it took to tell the first from everybody.
    first, *others = map(keys, ordered)
    decisive = max(_first_difference(first, other) for other in others)
    return ordered, f"tie: {_RULES[decisive]}"


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one) - 1)
