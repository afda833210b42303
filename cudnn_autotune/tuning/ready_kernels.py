"""Candidates that were fast on similar problems and can serve at once, since nothing is compiled.

A kernel of the package has settings that depend on the problem's size, and is compiled for each. So
where one was fast nearby, any of its settings serves whose kernel is compiled already, or kept by
an earlier process. If that is not the one that is expected to be the fastest, this one is compiled
in the background: further sizes, or other layers, may ask for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from cudnn_autotune.core.background import BackgroundThreads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.candidate_id import parse
from cudnn_autotune.engines.compiled_kernels import cubin, is_found
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import alike, gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.engines.user_implementation import is_users

_log = logging.getLogger(__name__)

# To plan a kernel for a setting takes up to a millisecond.
_MOST_SETTINGS = 8
# Sizes may keep coming, so that compiling for them takes no more than one core, and the latest ones
# are compiled first. What waits behind so many is dropped.
_BACKGROUND = BackgroundThreads(1)
_MOST_WAITING = 32
_waiting: deque[Future[None]] = deque()


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
        _waiting.append(_BACKGROUND.submit_next(_compile, kernels, gpu.compute_capability))


def _compile(kernels: Sequence[Kernel], compute_capability: tuple[int, int]) -> None:
    try:
        for kernel in kernels:
            cubin(kernel, compute_capability)
    except _C.PlanError as error:  # a search meets it too, and says so
        _log.debug("a kernel for new sizes does not compile: %s", str(error))
