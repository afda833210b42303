"""New sizes of layers whose sizes keep changing: which engines to serve them by without a search.

Problems that differ in nothing but the batch size and the spatial sizes belong to one layer. Once a
size of a layer has been measured in this process, a further one near it is served by what was fast
there, and later, if it is called often, measured in turns (``tuning.miss``). So is one that is far
from all that were measured, once the layer has met a few sizes.

A kernel of the package has settings that depend on the problem's size, and is compiled for each. So
where one was fast nearby, any of its settings serves whose kernel is compiled already, or kept by
an earlier process. If that is not the one that is expected to be the fastest, this one is compiled
in the background: further sizes, or other layers, may ask for it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields

from cudnn_autotune.core.background import BackgroundThreads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.candidate_id import parse
from cudnn_autotune.engines.compiled_kernels import cubin, is_found
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import alike, gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.engines.user_implementation import is_users
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
# To plan a kernel for a setting takes up to a millisecond.
_MOST_SETTINGS = 8
# Sizes may keep coming, so that compiling for them takes no more than one core, and the latest ones
# are compiled first. What waits behind so many is dropped.
_BACKGROUND = BackgroundThreads(1)
_MOST_WAITING = 32
_waiting: deque[Future[None]] = deque()


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
    """Within the context the problem is searched for, even if a size nearby is measured."""
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
    """Returns the Euclidean norm of the base-2 logarithms of the ratios of all sizes; channels are
    equal in one layer."""
    pairs = zip(one.input_shape, other.input_shape, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def _ranked(sizes: Sequence[tuple[float, _Measured]]) -> list[tuple[Candidate, float]]:
    """Returns the candidates of measured sizes, which lie at some distance each, the nearest first.
    Each has its time over the best's, in the geometric mean over the sizes, of which near ones
    weigh more; the best comes first, and each is described as at the nearest size that has it."""
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


def ready(
    nearby: Iterable[Candidate], problem: ConvProblem, device: int | Gpu
) -> Iterator[Candidate]:
    """Yields what may serve ``problem`` without compiling anything.

    Args:
        nearby: what was fast on similar problems, as described for these, the best first.
        device: the index of a CUDA device, or what is known of it.

    Returns:
        Candidates in the order of ``nearby``, kernels of the package with settings for ``problem``.
    """
    for candidate in nearby:
        if candidate.id.is_implementation and not is_users(candidate.text):
            gpu = device if isinstance(device, Gpu) else gpu_of(device)
            found = _ready_setting(candidate.text, problem, gpu)
            if found is not None:
                yield found
        elif not candidate.is_compiled:
            yield candidate


def _ready_setting(text: str, problem: ConvProblem, gpu: Gpu) -> Candidate | None:
    """Returns a candidate of the implementation that a text names, and has the one that is expected
    to be the fastest compiled if it is another one."""
    if parse(text).is_rewrite:
        return None  # a rewrite, whose engine would have to be built
    best: list[Kernel] | None = None
    found: Candidate | None = None
    for candidate in alike(text, problem, gpu)[:_MOST_SETTINGS]:
        if not candidate.is_compiled:
            return candidate
        try:
            kernels = recipe_of(candidate.text, problem, gpu).kernels
        except ImplementationError as error:
            _log.info("%s: %s", problem.text, str(error))
            continue
        if kernels is None:
            continue  # a function may take any time
        if all(is_found(kernel, gpu.compute_capability) for kernel in kernels):
            found = candidate
            break
        best = best or kernels
    if best is not None:
        _compile_later(best, gpu)
    return found


def _compile_later(kernels: Sequence[Kernel], gpu: Gpu) -> None:
    while len(_waiting) >= _MOST_WAITING:
        _waiting.popleft().cancel()
    with suppress(RuntimeError):  # the system gives no thread
        first = _BACKGROUND.first_place()
        _waiting.append(_BACKGROUND.submit_at(first, _compile, kernels, gpu.compute_capability))


def _compile(kernels: Sequence[Kernel], compute_capability: tuple[int, int]) -> None:
    try:
        for kernel in kernels:
            cubin(kernel, compute_capability)
    except _C.PlanError as error:  # a search meets it too, and says so
        _log.debug("a kernel for new sizes does not compile: %s", str(error))
