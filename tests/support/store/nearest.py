"""The search for similar problems among given keys."""

from __future__ import annotations

from collections.abc import Iterable

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store.neighbours import Neighbours


def nearest(problem: ConvProblem, keys: Iterable[str], most: int = 3) -> list[str]:
    """Returns up to ``most`` keys of decisions for problems similar to ``problem``, the nearest
    first, and none of ``problem`` itself. A key that names no problem is skipped."""
    index = Neighbours()
    index.add(keys)
    return [key for _, key in index.nearest(problem, most, lambda key: True)]
