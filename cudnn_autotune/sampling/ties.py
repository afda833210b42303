"""Who is taken among candidates that are as good as equally fast, and how an outcome is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudnn_autotune.engines import Candidate

# Candidates within this of the fastest (relative) are equally fast: less than what one process
# differs from the next by.
TIE_WIDTH = 0.005

_RULES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("deterministic", lambda c: "NONDETERMINISTIC" in c.numerical_notes),
    ("an engine of cuDNN", lambda c: c.engine is None),
    ("less workspace", lambda c: c.workspace_bytes),
    ("earlier in cuDNN's list", lambda c: c.place),
    ("the first by name", lambda c: c.text),
)


def order(tied: Sequence[Candidate]) -> list[Candidate]:
    """The tied, the one to take first; a fixed order, so that runs and ranks agree unasked."""
    return sorted(tied, key=lambda c: tuple(key(c) for _, key in _RULES))


def rule(tied: Sequence[Candidate]) -> str:
    """What decided among ``tied``: ``fastest`` where there is one only."""
    if len(tied) < 2:
        return "fastest"
    first, *others = order(tied)
    for name, key in _RULES:
        others = [other for other in others if key(other) == key(first)]
        if not others:
            return f"tie: {name}"
    raise ValueError(f"tied: {first.text!r} is there twice")
