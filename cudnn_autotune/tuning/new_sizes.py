"""New sizes of layers whose sizes keep changing: which engines to serve them by without a search.

Problems that differ in nothing but the batch size and the spatial sizes belong to one layer. Once a
few sizes of a layer have been measured in this process, a further one is served by what won on the
nearest of them, and later, if it is called often, measured in turns (``tuning.miss``).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.tuning.choice import Choice

# A layer with fewer measured sizes is not taken for one that keeps changing: a model may have it
# at several resolutions, or meet a last batch that is smaller.
_FEW = 4
# A size is served by its neighbour if that is nearer than this, in powers of two as in
# store.neighbours: a factor of two in the batch size or in one spatial size. Resolutions of one
# model are mostly further apart, and what won further away says less (docs/findings/neighbours.md).
_NEAR = 1.0
# Once a layer has been measured in so many sizes, the nearest one serves however far it is.
_MOST = 16
_MOST_NEIGHBOURS = 3
# To build and check the contenders of a trial takes as long as many calls. A size that is called
# less often than this does not pay it back.
_CALLS_BEFORE_TRIAL = 16

_Layer = tuple[object, ...]
_SHARED = [f.name for f in fields(ConvProblem) if f.name != "input_shape"]
_lock = threading.Lock()
_measured: dict[_Layer, dict[ConvProblem, Choice]] = {}
_searched: Counter[ConvProblem] = Counter()


def _layer(problem: ConvProblem, device: int) -> _Layer:
    return (device, *(getattr(problem, name) for name in _SHARED))


def add(choice: Choice) -> None:
    """Records a choice that was measured, here or elsewhere."""
    with _lock:
        sizes = _measured.setdefault(_layer(choice.problem, choice.device), {})
        sizes[choice.problem] = choice


def remove(problem: ConvProblem) -> None:
    """Clears what was measured of one problem."""
    with _lock:
        for sizes in _measured.values():
            sizes.pop(problem, None)


def clear() -> None:
    """Clears all that was measured."""
    with _lock:
        _measured.clear()


@contextmanager
def always_searched(problem: ConvProblem) -> Iterator[None]:
    """Within the context the problem has no neighbours."""
    with _lock:
        _searched[problem] += 1
    try:
        yield
    finally:
        with _lock:
            _searched[problem] -= 1
            if not _searched[problem]:
                del _searched[problem]


def winners_nearby(problem: ConvProblem, device: int) -> list[Candidate]:
    """Returns what won on the nearest sizes of the problem's layer, nearest first.

    Engines that are compiled at run time would stall the call, so the best of the others takes
    their place.

    Returns:
        Different candidates, as described for the problem that they won on. The list is empty if
        the problem is to be searched for: too few sizes of its layer are measured, or all of them
        are too different, or it was measured itself (under another policy), or within
        :func:`always_searched`.
    """
    with _lock:
        if problem in _searched:
            return []
        known = dict(_measured.get(_layer(problem, device), {}))
    if len(known) < _FEW or problem in known:
        return []
    by_distance = sorted(known, key=lambda other: _distance(problem, other))
    if _distance(problem, by_distance[0]) >= _NEAR and len(known) < _MOST:
        return []
    found: dict[str, Candidate] = {}
    for near in by_distance[:_MOST_NEIGHBOURS]:
        winner = _best_built_quickly(known[near])
        if winner is not None:
            found.setdefault(winner.text, winner)
    return list(found.values())


def _distance(one: ConvProblem, other: ConvProblem) -> float:
    """The Euclidean norm of the base-2 logarithms of the ratios of all sizes; channels are equal
    in one layer."""
    pairs = zip(one.input_shape, other.input_shape, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def _best_built_quickly(choice: Choice) -> Candidate | None:
    wrong = {text for text, _ in choice.rejected}
    for entry in choice.selection.ranking:
        candidate = entry.candidate
        is_timed = entry is choice.chosen or entry.time_ms is not None
        if is_timed and not candidate.is_compiled and candidate.text not in wrong:
            return candidate
    return None


class OnceItRecurs:
    """Puts off a trial's preparation until the problem has been called often enough.

    Args:
        step: the preparation (a ``_C.PreparationStep``).
    """

    def __init__(self, step: _C.PreparationStep) -> None:
        self._step = step
        self._calls = 0
        self.begin: Callable[[], None] | None = None
        """Called once, before the first step."""

    def __call__(self, *tensors: Tensor) -> tuple[tuple[str, _C.Plan | None] | None, int]:
        """A ``_C.PreparationStep``."""
        self._calls += 1
        if self._calls < _CALLS_BEFORE_TRIAL:
            return None, 1
        if self.begin is not None:
            self.begin()
            self.begin = None
        return self._step(*tensors)
