"""Who is taken among candidates that are as good as equally fast, and how an outcome is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudnn_autotune.engines import Candidate

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


def settle(times: Mapping[Candidate, float]) -> tuple[list[Candidate], str]:
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
    decided, others = "fastest", ordered[1:]
    for number, rule in enumerate(_RULES):
        if not others:
            break
        decided = f"tie: {rule}"
        others = [c for c in others if keys(c)[number] == keys(ordered[0])[number]]
    return ordered, decided
