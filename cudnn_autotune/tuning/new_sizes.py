"""New sizes of layers whose sizes keep changing: which engines to serve them by without a search.

Problems that differ in nothing but the batch size and the spatial sizes belong to one layer. Once a
size of a layer has been measured in this process, a further one near it is served by what was fast
there, and later, if it is called often, measured in turns (``tuning.miss``). So is one that is far
from all that were measured, once the layer has met a few sizes.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.tuning.choice import Choice

_log = logging.getLogger(__name__)

# A size is served by a measured one if that is nearer than this, in powers of two as in
# store.neighbours: a factor of two in the batch size or in one spatial size. Resolutions of one
# model are mostly further apart, and what won further away says less (docs/findings/neighbours.md).
_NEAR = 1.0
# A layer that has met so many sizes, more than a pyramid's, keeps changing: the nearest one serves
# however far it is. Each size that is searched for stalls the program, and one that recurs is
# measured later in any case.
_FEW = 8
# The engine that won on the nearest of two measured sizes was 4.3 % off the best on the others, and
# the one with the best weighted mean 3.6 %; with four measured sizes 3.7 and 2.8 % (46 sizes of a
# ResNet-50 in twelve orders, an H100). What was not timed counts as this many times the best.
_NOT_TIMED = 1.3
# At each new size PyTorch's own path asks cuDNN's heuristics, and builds a plan. An engine that was
# nearly as fast needs the plan only.
_OWN_PATH = 1.02
_LEAST_DISTANCE = 0.05
_MOST_SIZES = 8
_MOST_SERVING = 3
# To build and check the contenders of a trial takes about 15 ms of the program's time, and makes a
# call about 3 % faster. So a trial begins once the calls of its size have taken this long, or at
# the least call, if no time is known.
_PAID_BACK_MS = 500.0
_LEAST_CALLS = 16


@dataclass(frozen=True)
class _Measured:
    """The results of a search for one size."""

    time_ms: float | None
    """Milliseconds of a call of the chosen candidate; None if it was not timed."""
    candidates: Mapping[str, Candidate]
    """Candidates that are right, the chosen one first, by the name of their implementation if they
    are of one, since its settings depend on the size; else by their text."""
    logs: Mapping[str, float]
    """By the same names: the logarithm of the time of each over the chosen one's, or 0 of those
    that are faster. Of candidates that differ by less than matters, the first was chosen."""


_Layer = tuple[object, ...]
_SHARED = [f.name for f in fields(ConvProblem) if f.name != "input_shape"]
_lock = ForkSafeLock()
_measured: dict[_Layer, dict[ConvProblem, _Measured]] = {}
_met: Counter[_Layer] = Counter()
"""Number of sizes of each layer that came after its first measured one."""
_searched: Counter[ConvProblem] = Counter()


def _layer(problem: ConvProblem, device: int) -> _Layer:
    return (device, *(getattr(problem, name) for name in _SHARED))


def add(choice: Choice) -> None:
    """Records a choice that was measured, here or elsewhere."""
    measured = _measured_by(choice)
    with _lock:
        sizes = _measured.setdefault(_layer(choice.problem, choice.device), {})
        sizes[choice.problem] = measured


def _measured_by(choice: Choice) -> _Measured:
    wrong = {text for text, _ in choice.rejected}
    candidates: dict[str, Candidate] = {}
    times: dict[str, float] = {}
    for entry in choice.selection.ranking:
        candidate = entry.candidate
        if entry.time_ms and candidate.text not in wrong:
            name = candidate.engine_name if candidate.id.is_implementation else candidate.text
            candidates.setdefault(name, candidate)
            times.setdefault(name, entry.time_ms)
    chosen_ms = next(iter(times.values()), 1.0)
    logs = {name: max(0.0, math.log(ms / chosen_ms)) for name, ms in times.items()}
    return _Measured(choice.time_ms, candidates, logs)


def remove(problem: ConvProblem) -> None:
    """Clears what was measured of one problem."""
    with _lock:
        for sizes in _measured.values():
            sizes.pop(problem, None)


def clear() -> None:
    """Clears all that was measured."""
    with _lock:
        _measured.clear()
        _met.clear()


@contextmanager
def always_searched(problem: ConvProblem) -> Iterator[None]:
    """Within the context the problem is searched for, whatever is measured nearby."""
    with _lock:
        _searched[problem] += 1
    try:
        yield
    finally:
        with _lock:
            _searched[problem] -= 1
            if not _searched[problem]:
                del _searched[problem]


def fast_nearby(problem: ConvProblem, device: int) -> list[Candidate] | None:
    """Returns what was fast on measured sizes of the problem's layer, the best first; the nearer a
    size is, the more it counts. Behind engines that are compiled at run time, which would stall a
    call, comes the best of the others.

    Returns:
        Different candidates, as described for the nearest size that has timed them. None if the
        problem is to be searched for: no size of its layer is measured, or those are too
        different and the layer has met few, or it was measured itself (under another policy), or
        within :func:`always_searched`, or the store's mode is ``retune``.
    """
    if store_settings.get_store_settings().mode == "retune":
        return None
    with _lock:
        if problem in _searched:
            return None
        layer = _layer(problem, device)
        known = dict(_measured.get(layer, {}))
        if not known or problem in known:
            return None
        _met[layer] += 1
        has_met = _met[layer]
    sizes = [(_distance(problem, other), measured) for other, measured in known.items()]
    sizes.sort(key=lambda size: size[0])
    if sizes[0][0] >= _NEAR and has_met < _FEW:
        return None
    ranked = _ranked(sizes[:_MOST_SIZES])
    serving = [c for c, times_best in ranked if times_best < _NOT_TIMED][:_MOST_SERVING]
    quick = [c for c, _ in ranked if not c.is_compiled][:1]
    return list(dict.fromkeys([*serving, *quick]))


def calls_before_trial(problem: ConvProblem, device: int) -> int:
    """Returns the number of the call of a new size in which its trial begins: so late that what the
    trial costs is about what the calls until then could have saved. The time of a call is that of
    the nearest measured size, in proportion to the elements of the input."""
    with _lock:
        sizes = list(_measured.get(_layer(problem, device), {}).items())
    timed = [(size, measured.time_ms) for size, measured in sizes if measured.time_ms]
    if not timed:
        return _LEAST_CALLS
    nearest, time_ms = min(timed, key=lambda size: _distance(problem, size[0]))
    call_ms = time_ms * math.prod(problem.input_shape) / math.prod(nearest.input_shape)
    return max(_LEAST_CALLS, math.ceil(_PAID_BACK_MS / call_ms))


def _distance(one: ConvProblem, other: ConvProblem) -> float:
    """The Euclidean norm of the base-2 logarithms of the ratios of all sizes; channels are equal
    in one layer."""
    pairs = zip(one.input_shape, other.input_shape, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def _ranked(sizes: Sequence[tuple[float, _Measured]]) -> list[tuple[Candidate, float]]:
    """The candidates of measured sizes, which lie at some distance each, the nearest first. With
    each its time over the best's, in the geometric mean over the sizes, of which near ones weigh
    more; the best comes first, and each is described as at the nearest size that has it."""
    found: dict[str, Candidate] = {}
    for _, measured in sizes:
        for name, candidate in measured.candidates.items():
            found.setdefault(name, candidate)
    weighted = [(max(distance, _LEAST_DISTANCE) ** -2, size.logs) for distance, size in sizes]
    weights = sum(weight for weight, _ in weighted)
    not_timed = math.log(_NOT_TIMED)

    def mean(name: str) -> float:
        total = sum(weight * logs.get(name, not_timed) for weight, logs in weighted)
        return math.exp(total / weights) * (_OWN_PATH if name == ATEN.text else 1.0)

    return sorted(((c, mean(name)) for name, c in found.items()), key=lambda item: item[1])


class LazyPreparation:
    """The preparation step of a trial, which begins the trial when it first runs, if :meth:`start`
    has not."""

    def __init__(self) -> None:
        self.begin: Callable[[], _C.PreparationStep] | None = None
        """Begins the trial, and returns the step of its preparation; called once."""
        self._step: _C.PreparationStep | None = None

    def start(self) -> bool:
        """Begins the trial; returns False if the system gives no thread: then what serves stays."""
        assert self.begin is not None
        try:
            self._step, self.begin = self.begin(), None
        except RuntimeError as error:
            _log.info("a trial is not begun: %s", error)
            return False
        return True

    def __call__(self, *tensors: Tensor) -> tuple[_C.Plan | None, int]:
        """A ``_C.PreparationStep``."""
        if self._step is None and not self.start():
            return None, 0
        assert self._step is not None
        return self._step(*tensors)
