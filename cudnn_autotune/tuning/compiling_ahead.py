"""Compilation of engines in the background, before the search of their problem needs them.

A search compiles on several threads, but mostly waits for the one or two engines of its problem. So
the cores are busy only if engines of many problems are compiled side by side. These are the
problems of a compiled graph (:func:`compiling`), in their order, and a backward's while its forward
is searched (:func:`start_backward`). A backward's last problem is compiled first.
"""

from __future__ import annotations

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from cudnn_autotune import sampling
from cudnn_autotune.core.background import (
    COMPILING,
    COMPILING_CUDNN,
    CORES,
    BackgroundThreads,
    Place,
)
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.compiled_kernels import digest
from cudnn_autotune.engines.configs import Candidate, Device, cuda_index, open_search
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of, recipe_of
from cudnn_autotune.engines.problem import MOST_ALIGNED, ConvProblem
from cudnn_autotune.engines.registry import ImplementationError, is_users
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import Shortlister
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.timers.gpu_timer import Built
from cudnn_autotune.tuning import remembering, settings

_log = logging.getLogger(__name__)

# The most problems whose plans wait for a search; older ones are dropped. A model that records
# gradients and never computes them leaves its plans here.
_MOST = 256

# Threads beside a search, which compiles and times as well. On an H200 with 16 cores the
# first step of an EfficientNet-B0 took 24 s with twelve threads and 21 s with four.
_BESIDE_A_SEARCH = BackgroundThreads(max(1, min(CORES // 4, 4)))

Search = tuple[ConvProblem, Device, str, int | None]
"""A problem to search: the first four arguments of :func:`start`."""
Plans = dict[str, "Future[Built]"]
"""Candidate text -> future of its plan."""
_Key = tuple[bytes, int | str]

_begun: OrderedDict[_Key, Future[Plans]] = OrderedDict()
_kernels: set[str] = set()  # digests of the package's kernels whose compilation was begun here


def start(
    problem: ConvProblem,
    device: Device,
    mode: str,
    workspace_limit: int | None,
    threads: BackgroundThreads | None = None,
    place: Place | None = None,
) -> None:
    """Begins to compile the engines that a search of ``problem`` would, unless a choice is known.

    Args:
        mode: the sampling mode; an empty text stands for the settings'.
        workspace_limit: bytes; None: no limit.
        threads: None: ``COMPILING``, and ``COMPILING_CUDNN`` for engines of cuDNN.
        place: the place in the threads' queue; None: before all earlier work.
    """
    threads, of_cudnn = threads or COMPILING, threads or COMPILING_CUDNN
    mode = mode or settings.get_sampling()
    is_limited = settings.get_budget_ms() is not None or settings.get_benchmark_limit() > 0
    key = _key(problem, device)
    traits = sampling.traits(mode) if mode in sampling.names() else sampling.Traits()
    # The other modes take compiled engines, or compile on threads of their own.
    is_needless = is_limited or key in _begun or store_settings.is_locked()
    if traits.shortlist is None or traits.decides_later or is_needless:
        return
    index, nearby = cuda_index(device), []
    if index is not None:
        if remembering.find(problem, Policy(mode, workspace_limit), index) is not None:
            return
        nearby = remembering.similar(problem, index)
    with LOCK, suppress(RuntimeError):  # the system gives no thread: the search compiles
        place = place or threads.first_place()
        arguments = (problem, device, traits.shortlist, workspace_limit, nearby)
        _begun[key] = threads.submit_at(place, _compile, threads, of_cudnn, place, *arguments)
        while len(_begun) > _MOST:
            _cancel(_begun.popitem(last=False)[1])


def start_backward(
    computed: ConvProblem, device: Device, mode: str, workspace_limit: int | None
) -> None:
    """Begins to compile for the gradients of the forward convolution that this thread computes. It
    does nothing if the thread computes a gradient."""
    of_input, of_weight = _C.expected_gradients()
    x, w, _ = computed.alignment
    plain = replace(computed, bias=False, residual=False, activation="", pixel_strides=None)
    # A gradient lies in new memory.
    gradients = [
        (of_weight, replace(plain, op="wgrad", alignment=(x, MOST_ALIGNED, MOST_ALIGNED))),
        (of_input, replace(plain, op="dgrad", alignment=(MOST_ALIGNED, w, MOST_ALIGNED))),
    ]
    for is_expected, problem in gradients:
        if is_expected:
            start(problem, device, mode, workspace_limit, _BESIDE_A_SEARCH)


def take(problem: ConvProblem, device: Device) -> Plans:
    """Hands over the plans that are compiled or being compiled for ``problem``. The caller compiles
    those that have not begun."""
    with LOCK:
        listing = _begun.pop(_key(problem, device), None)
    if listing is None or listing.cancel():
        return {}
    return {text: plan for text, plan in listing.result().items() if not plan.cancel()}


def is_ready(problem: ConvProblem, device: Device) -> bool:
    """Returns whether a search of ``problem`` would not wait for a compilation here."""
    with LOCK:
        listing = _begun.get(_key(problem, device))
    if listing is None or not listing.done():
        return listing is None
    # Another thread may cancel it at any time before it is done.
    return listing.cancelled() or all(plan.done() for plan in listing.result().values())


def start_all(wanted: Iterable[Search]) -> None:
    """Begins to compile for problems, in this order and before all earlier work."""
    first = COMPILING.first_place()
    for number, search in enumerate(wanted):
        start(*search, place=(*first, number))


@contextmanager
def compiling(wanted: Sequence[Search]) -> Iterator[None]:
    """Compiles for problems, in this order, as long as the context lasts. Plans that no search has
    taken by then are dropped."""
    start_all(wanted)
    try:
        yield
    finally:
        _drop(_key(problem, device) for problem, device, _, _ in wanted)


def _key(problem: ConvProblem, device: Device) -> _Key:
    index = cuda_index(device)
    return _C.problem_key(problem.native()), str(device) if index is None else index


def _drop(keys: Iterable[_Key]) -> None:
    with LOCK:
        for key in keys:
            if (listing := _begun.pop(key, None)) is not None:
                _cancel(listing)


def _cancel(listing: Future[Plans]) -> None:
    if not listing.cancel():
        listing.add_done_callback(lambda done: [plan.cancel() for plan in done.result().values()])


class _WithoutOperands(QueriedCandidates):
    """The candidates of a problem without tensors. The kernels of PyTorch's own path make no
    difference to the compilations."""

    aten_uses_cudnn = False


def _compile(
    threads: BackgroundThreads,
    of_cudnn: BackgroundThreads,
    place: Place,
    problem: ConvProblem,
    device: Device,
    shortlist: Shortlister,
    workspace_limit: int | None,
    nearby: Sequence[Candidate],
) -> Plans:
    """Begins to build the plans, each on a thread of its own, before work of later places."""
    try:
        search = open_search(problem, device)
        gpu = gpu_of(device)
        every = shortlist(_WithoutOperands(search, problem, (), workspace_limit, nearby, gpu), 0)
        # A user's implementation may first be run in another process, for which its search waits.
        compiled = {c.text: c for c in every if c.is_compiled and not is_users(c.text)}
        build, plans = search.build_many, {}
        for text, candidate in compiled.items():
            if candidate.engine is not None:
                plans[text] = of_cudnn.submit_at(place, build, [text], 1)
            else:
                # A thread would wait for another that compiles the same kernel.
                at = place if _is_first(text, problem, gpu) else (place[0], math.inf)
                plans[text] = threads.submit_at(at, build, [text], 1)
        return plans
    except Exception as error:  # the search meets it too, and knows what to do
        _log.debug("%s: nothing is compiled ahead: %s", problem.text, error)
        return {}


def _is_first(text: str, problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether a candidate of the package has a kernel that is new in these calls."""
    try:
        kernels = recipe_of(text, problem, gpu).kernels or ()
    except ImplementationError:  # it does not build either, with a reason
        return True
    digests = {digest(kernel, gpu.compute_capability) for kernel in kernels}
    with LOCK:
        is_first = not digests or not digests <= _kernels
        _kernels.update(digests)
    return is_first


def _forget() -> None:
    _begun.clear()
    _kernels.clear()


# A child process has none of the threads that would compile.
os.register_at_fork(after_in_child=_forget)
