"""Rules that choose between about equally fast candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cudnn_autotune.engines.configs import Candidate

# Candidates within this relative distance of the fastest are equally fast: processes differ by
# more.
TIE_WIDTH = 0.005
# No measurement resolves smaller relative differences than this: then cuDNN's order decides, so
# that runs agree. Otherwise time decides. On H200s cuDNN's order had decided 24 ties: in 3 of them
# the other one, measured as 0.3 to 0.5 % faster, was faster by 1.4 to 2.3 %.
_INDISTINGUISHABLE = 0.002

_ADVANTAGES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("deterministic", lambda c: "NONDETERMINISTIC" in c.numerical_notes),
    ("an engine of cuDNN", lambda c: c.engine is None),
    ("one kernel", lambda c: c.is_unfused),
    ("less workspace", lambda c: c.workspace_bytes),
)
_RULES = (
    *(name for name, _ in _ADVANTAGES),
    "faster",
    "earlier in cuDNN's list",
    "the first by name",
)


def break_ties(times: Mapping[Candidate, float]) -> tuple[list[Candidate], str]:
    """Sorts tied candidates by preference, and names the rule that decided.

    Args:
        times: the time of each tied candidate, in any unit.

    Returns:
        The candidates, the preferred one first, and the rule: ``fastest`` if there is only one.
    """
    advantages = {c: tuple(key(c) for _, key in _ADVANTAGES) for c in times}
    least: dict[object, float] = {}
    for candidate, time in times.items():
        alike = advantages[candidate]
        least[alike] = min(time, least.get(alike, time))

    def keys(candidate: Candidate) -> tuple[object, ...]:
        alike, time = advantages[candidate], times[candidate]
        is_behind = time > (1 + _INDISTINGUISHABLE) * least[alike]
        return (*alike, time if is_behind else 0.0, candidate.place, candidate.text)

    ordered = sorted(times, key=keys)
    if len(ordered) < 2:
        return ordered, "fastest"
    # The decisive rule is the last one needed to separate the first from all others.
    first, *others = map(keys, ordered)
    decisive = max(_first_difference(first, other) for other in others)
    return ordered, f"tie: {_RULES[decisive]}"


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one) - 1)
