"""New sizes of layers whose sizes keep changing: the candidates that serve them without a search.

Problems that differ only in batch size and spatial sizes belong to one layer. Once a size of a
layer has been measured, a further one is served by a winner at alike sizes
(``tuning.alike_sizes``). Its lead over PyTorch's own path there must exceed the doubt between the
sizes; else PyTorch's own path serves. A size that is called often is measured later, in turns
(``tuning.miss``).

A kernel of the package has settings that depend on the problem's size, and is compiled for each. If
one was fast at alike sizes, its settings measured there serve, or any if even the slowest was fast.
Its kernel must be compiled already, or kept by an earlier process. The setting that is expected to
be the fastest is compiled in the background: further sizes, or other layers, may need it.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from cudnn_autotune.core.background import BackgroundThreads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.candidate_id import identify, parse
from cudnn_autotune.engines.compiled_kernels import cubin, is_found
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import alike as offered_alike
from cudnn_autotune.engines.offers import gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.engines.registry import ImplementationError, is_users
from cudnn_autotune.sampling.screening import SLOW
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import gain
from cudnn_autotune.tuning.alike_sizes import distance, doubt, is_alike
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import Layer, keep_in, layer_of

_log = logging.getLogger(__name__)

# A layer with this number of sizes, more than a pyramid has, keeps changing. Further sizes are not
# searched for, which would stall the program; recurring ones are measured later.
_FEW = 8
# On sizes that were not measured, the winner at the nearest of two measured sizes was 4.3 % off the
# best, and the engine with the best weighted mean 3.6 %. With four measured sizes these are 3.7 and
# 2.8 % (46 sizes of a ResNet-50 in twelve orders, an H100). A candidate without a time counts as
# this factor times the best.
_NOT_TIMED = 1.3
# The doubt between equal sizes: the differences of single times.
_LEAST_DOUBT = 0.01
_LEAST_DISTANCE = 0.05
_MOST_SIZES = 8
_MOST_SERVING = 3
# Building and checking a trial's contenders takes about 15 ms of the program's time, and makes a
# call about 3 % faster. So a trial begins once the calls of its size have taken this long. Without
# a known time it begins at the call number below.
_PAID_BACK_MS = 500.0
_LEAST_CALLS = 16
# To plan a kernel for a setting takes up to a millisecond. A search by ``auto`` times this number.
_MOST_SETTINGS = 4
# Sizes may keep coming. So compiling for them takes one core at most, the latest ones come first,
# and older entries of a longer queue are dropped.
_BACKGROUND = BackgroundThreads(1)
_MOST_WAITING = 32
_waiting: deque[Future[None]] = deque()


@dataclass(frozen=True)
class _Measured:
    """The results of a search for one size."""

    time_ms: float
    """Milliseconds of a call of the chosen candidate."""
    pytorch_ms: float
    """Least milliseconds of a call of PyTorch's own path."""
    candidates: Mapping[str, Candidate]
    """Right candidates by their text, the chosen one first."""
    times_ms: Mapping[str, float]
    """Milliseconds of a call by the same texts. If several settings of an implementation were
    timed, its name has the slowest one's."""


@dataclass(frozen=True)
class Nearby:
    """The findings on a new size, from the measured sizes of its layer."""

    serving: tuple[Candidate, ...] = ()
    """Candidates that are expected to beat PyTorch's own path, the best first."""
    any_setting: frozenset[str] = frozenset()
    """Names of implementations whose settings are all expected to beat PyTorch's own path."""
    contenders: tuple[Candidate, ...] = ()
    """Candidates to compare if the size is called often, the best first."""
    is_known: bool = False
    """Whether PyTorch's own path was the best at alike sizes: no comparison is needed."""


_lock = ForkSafeLock()
_measured: dict[Layer, dict[ConvProblem, _Measured]] = {}
_met: Counter[Layer] = Counter()
"""Number of sizes of each layer that came after its first measured one."""
_searched: Counter[ConvProblem] = Counter()


def add(choice: Choice) -> None:
    """Records a choice measured here or elsewhere."""
    measured = _measured_by(choice)
    if measured is None:
        return
    with _lock:
        sizes = _measured.setdefault(layer_of(choice.problem, choice.device), {})
        sizes[choice.problem] = measured


def _measured_by(choice: Choice) -> _Measured | None:
    wrong = {text for text, _ in choice.rejected}
    candidates: dict[str, Candidate] = {}
    times: dict[str, float] = {}
    settings: dict[str, list[float]] = {}
    for entry in choice.selection.ranking:
        candidate, time_ms = entry.candidate, entry.time_ms
        if time_ms and time_ms < math.inf and candidate.text not in wrong:
            candidates.setdefault(candidate.text, candidate)
            times.setdefault(candidate.text, time_ms)
            if candidate.id.is_implementation:
                settings.setdefault(candidate.engine_name, []).append(time_ms)
    if not times:
        return None
    for name, of_settings in settings.items():
        if len(of_settings) > 1:
            times[name] = max(of_settings)
    time_ms = next(iter(times.values()))
    return _Measured(time_ms, _pytorchs_ms(choice, time_ms), candidates, times)


def _pytorchs_ms(choice: Choice, chosen_ms: float) -> float:
    """Returns a lower bound of the time of PyTorch's own path."""
    entry = gain.own_path_entry(choice.selection)
    if entry is not None and entry.time_ms:
        # A single launch may have been disturbed.
        return entry.low_ms or (entry.time_ms if entry.samples > 1 else entry.time_ms / SLOW)
    # It was left out because it takes longer than the chosen candidate, and longer than its
    # convolution.
    problem = choice.problem
    alone = replace(problem, bias=False, residual=False, activation="")
    with _lock:
        measured = _measured.get(layer_of(alone, choice.device), {}).get(alone)
    return max(chosen_ms, measured.pytorch_ms) if measured and alone != problem else chosen_ms


def remove(problem: ConvProblem) -> None:
    """Clears the measurements of one problem."""
    with _lock:
        for sizes in _measured.values():
            sizes.pop(problem, None)


def clear() -> None:
    """Clears all measurements."""
    with _lock:
        _measured.clear()
        _met.clear()


@contextmanager
def always_searched(problem: ConvProblem) -> Iterator[None]:
    """Makes misses search for the problem within the context, even if a nearby size is measured."""
    with _lock:
        _searched[problem] += 1
    try:
        yield
    finally:
        with _lock:
            _searched[problem] -= 1
            if not _searched[problem]:
                del _searched[problem]


def fast_nearby(
    problem: ConvProblem, device: int, stored: Callable[[], Iterable[Decision]] = tuple
) -> Nearby | None:
    """Returns the findings on the problem from the measured sizes of its layer.

    Args:
        stored: looks up decisions for similar problems that are new to this process.

    Returns:
        The findings. None if the problem needs a search: this process has no choice for another
        size of its layer; no measured size is alike and the layer has met few; the problem was
        measured under another policy; or :func:`always_searched` or the mode ``retune`` is in
        force.
    """
    if store_settings.get_store_settings().mode == "retune":
        return None
    with _lock:
        if problem in _searched:
            return None
        layer = layer_of(problem, device)
        known = dict(_measured.get(layer, {}))
        if not known or problem in known:
            return None
        _met[layer] += 1
        has_met = _met[layer]
    alike = [size for size in known if is_alike(problem, size)]
    if not alike:
        for decision in stored():
            size = decision.problem
            is_measured = decision.selection.total_samples > 0
            if is_measured and size not in known and layer_of(size, device) == layer:
                add(Choice(decision, device, "store"))
        with _lock:
            known = dict(_measured.get(layer, {}))
        alike = [size for size in known if is_alike(problem, size)]
    if not alike and has_met < _FEW:
        return None
    nearest = _nearest(problem, known)
    ranked = _ranked([(distance(problem, size), known[size]) for size in nearest])
    compared = {size: known[size] for size in _nearest(problem, alike)}
    nearby = _Expected(problem, compared, gpu_of(device)).nearby()
    return replace(nearby, contenders=_contenders(ranked))


def _nearest(problem: ConvProblem, sizes: Iterable[ConvProblem]) -> list[ConvProblem]:
    return sorted(sizes, key=lambda size: distance(problem, size))[:_MOST_SIZES]


class _Expected:
    """The expected ratio of candidates' times to PyTorch's own path's, from alike sizes."""

    def __init__(self, problem: ConvProblem, alike: Mapping[ConvProblem, _Measured], gpu: Gpu):
        self._problem, self._gpu = problem, gpu
        self._sizes, self._alike = list(alike), list(alike.values())
        self._doubts: dict[bool, list[float]] = {}

    def most(self, name: str) -> float:
        """Returns the logarithm of the largest expected ratio: the mean over alike sizes, weighted
        by their certainty, plus their disagreement and the least doubt. Infinity if the candidate
        was not timed at any of them.

        Args:
            name: a candidate's text, or an implementation's name for the slowest of its settings.
        """
        doubts = self._doubts_of(has_image_tiles=identify(name).is_implementation)
        times = [measured.times_ms.get(name) for measured in self._alike]
        timed = [size_doubt for size_doubt, ms in zip(doubts, times, strict=True) if ms]
        if not timed:
            return math.inf
        logs = [
            math.log((ms or _NOT_TIMED * measured.time_ms) / measured.pytorch_ms)
            for measured, ms in zip(self._alike, times, strict=True)
        ]
        weights = [size_doubt**-2 for size_doubt in doubts]
        mean = _mean(logs, weights)
        spread = math.sqrt(_mean([(log - mean) ** 2 for log in logs], weights))
        return mean + spread + min(timed)

    def _doubts_of(self, has_image_tiles: bool) -> list[float]:
        if has_image_tiles not in self._doubts:
            least_ms = [min(measured.time_ms, measured.pytorch_ms) for measured in self._alike]
            self._doubts[has_image_tiles] = [
                max(_LEAST_DOUBT, doubt(self._problem, size, self._gpu, ms, has_image_tiles))
                for size, ms in zip(self._sizes, least_ms, strict=True)
            ]
        return self._doubts[has_image_tiles]

    def nearby(self) -> Nearby:
        candidates: dict[str, Candidate] = {}
        names: set[str] = set()
        for measured in self._alike:
            for text, candidate in measured.candidates.items():
                candidates.setdefault(text, candidate)
            names |= measured.times_ms.keys() - measured.candidates.keys()
        most = {text: self.most(text) for text in candidates if text != OWN_PATH.text}
        serving = sorted((text for text in most if most[text] < 0), key=most.__getitem__)
        return Nearby(
            serving=tuple(candidates[text] for text in serving),
            any_setting=frozenset(name for name in names if self.most(name) < 0),
            is_known=bool(self._alike) and not any(map(_gains, self._alike)),
        )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(map(operator.mul, values, weights)) / sum(weights)


def _gains(measured: _Measured) -> bool:
    """Returns whether a candidate may have been faster than PyTorch's own path at a size."""
    aten_ms = measured.times_ms.get(OWN_PATH.text, math.inf)
    return measured.time_ms < aten_ms


def _contenders(ranked: Iterable[tuple[Candidate, float]]) -> tuple[Candidate, ...]:
    """Returns the best candidates. Engines compiled at run time would stall a call: the best of the
    others follows them."""
    best = [c for c, times_best in ranked if times_best < _NOT_TIMED][:_MOST_SERVING]
    quick = [c for c, _ in ranked if not c.is_compiled][:1]
    return tuple(dict.fromkeys([*best, *quick]))


def calls_before_trial(problem: ConvProblem, device: int) -> int:
    """Returns the number of calls of a new size after which its trial pays for itself: they could
    have saved about the trial's cost. A call's time is scaled from the nearest measured size by the
    elements of the input."""
    with _lock:
        sizes = list(_measured.get(layer_of(problem, device), {}).items())
    if not sizes:
        return _LEAST_CALLS
    nearest, measured = min(sizes, key=lambda size: distance(problem, size[0]))
    call_ms = measured.time_ms * math.prod(problem.input_shape) / math.prod(nearest.input_shape)
    return max(_LEAST_CALLS, math.ceil(_PAID_BACK_MS / call_ms))


def _ranked(sizes: Sequence[tuple[float, _Measured]]) -> list[tuple[Candidate, float]]:
    """Returns the candidates of measured sizes (given with distances, the nearest first), the best
    first. Each has the geometric mean over the sizes of its time over the best's; near sizes weigh
    more. An implementation has one candidate, its best setting at the nearest size that has it,
    because settings depend on the size."""
    found: dict[str, Candidate] = {}
    logs: list[dict[str, float]] = []
    for _, measured in sizes:
        logs.append({})
        for text, candidate in measured.candidates.items():
            name = candidate.engine_name if candidate.id.is_implementation else text
            found.setdefault(name, candidate)
            times_chosen = measured.times_ms[text] / measured.time_ms
            logs[-1].setdefault(name, max(0.0, math.log(times_chosen)))
    weights = [max(distance, _LEAST_DISTANCE) ** -2 for distance, _ in sizes]
    not_timed = math.log(_NOT_TIMED)

    def mean(name: str) -> float:
        return math.exp(_mean([of_size.get(name, not_timed) for of_size in logs], weights))

    return sorted(((c, mean(name)) for name, c in found.items()), key=lambda item: item[1])


def ready(nearby: Nearby, problem: ConvProblem, device: int | Gpu) -> Iterator[Candidate]:
    """Yields the candidates that may serve ``problem`` without a compilation.

    Args:
        nearby: the findings at alike sizes.
        device: the index of a CUDA device, or its properties.

    Returns:
        Candidates in the order of ``nearby.serving``, kernels of the package with settings for
        ``problem``.
    """
    asked: set[str] = set()
    for candidate in nearby.serving:
        name = candidate.engine_name
        if candidate.id.is_implementation and not is_users(candidate.text):
            if name not in asked:
                asked.add(name)
                gpu = device if isinstance(device, Gpu) else gpu_of(device)
                found = _ready_setting(name, nearby, problem, gpu)
                if found is not None:
                    yield found
        elif not candidate.is_compiled:
            yield candidate


def _ready_setting(name: str, nearby: Nearby, problem: ConvProblem, gpu: Gpu) -> Candidate | None:
    """Returns a candidate of an implementation that needs no compilation. If another one is
    expected to be the fastest, its compilation begins."""
    wanted = [c.text for c in nearby.serving if c.engine_name == name]
    if parse(wanted[0]).is_rewrite:
        return None  # a rewrite, whose engine would have to be built
    offered = {c.text: c for c in offered_alike(wanted[0], problem, gpu)}
    if name in nearby.any_setting:
        wanted += [text for text in offered if text not in wanted]
    best: list[Kernel] | None = None
    for candidate in [offered[text] for text in wanted if text in offered][:_MOST_SETTINGS]:
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
            if best is not None:
                _compile_later(best, gpu)
            return candidate
        best = best or kernels
    if best is not None:
        _compile_later(best, gpu)
    return None


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
    except _C.PlanError as error:  # a search meets it too, and reports it
        _log.debug("a kernel for new sizes does not compile: %s", str(error))


keep_in(sys.modules[__name__])
