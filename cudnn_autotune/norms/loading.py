"""Plans of batch norms with their kernels compiled and loaded, for the operators on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from cudnn_autotune.core.background import COMPILING, spare_threads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.norms.plan import (
    FORMS,
    Form,
    NormProblem,
    distinct_plans,
    plan_norm,
    unsupported_by_kernels,
)

_POINTERS = {False: 13, True: 15}
"""Number of a forward's and a backward's kernel's addresses, with the workspace's."""
_FLOATS = {False: 2, True: 0}
"""Number of their numbers: a forward's epsilon and momentum of running statistics."""
_MOST_THREADS = 4
"""Threads that compile kernels side by side."""


def compiled_forms(problems: Sequence[NormProblem], device: int) -> list[Form]:
    """Compiles and returns the forms that compute problems by different kernels on a GPU, the
    expected fastest one first. Returns none if no kernel computes one of the problems.

    Args:
        problems: a forward, and its backward if there is one.
        device: the index of the GPU.

    Raises:
        PlanError: a kernel does not compile.
    """
    if any(unsupported_by_kernels(problem) for problem in problems):
        return []
    capability = torch.cuda.get_device_capability(device)
    forms = distinct_plans(problems, gpu_of(device))
    kernels = {
        launch.kernel for plans in forms.values() for plan in plans for launch in plan.launches
    }
    with ThreadPoolExecutor(spare_threads(_MOST_THREADS)) as threads:
        list(threads.map(lambda kernel: cubin(kernel, capability), kernels))
    return list(forms)


def start_compiling(problem: NormProblem, device: int) -> None:
    """Begins to compile the kernels that a problem has by default, in the background. The first
    call of the problem waits for its kernels, and reports what does not compile.

    Args:
        device: the index of the GPU.
    """
    if unsupported_by_kernels(problem) is not None:
        return
    with suppress(RuntimeError):  # the system gives no thread: the first call compiles
        for launch in plan_norm(problem, gpu_of(device)).launches:
            _start(launch.kernel, torch.cuda.get_device_capability(device))


@functools.lru_cache(maxsize=256)
def _start(kernel: Kernel, compute_capability: tuple[int, int]) -> None:
    """Begins to compile a kernel, once: a second thread would wait for the first."""
    COMPILING.submit(cubin, kernel, compute_capability)


def load_plan(device: int, form: int, *fields: Any) -> _C.NormPlan | None:
    """Returns the plan of a problem on a GPU, or None if PyTorch computes it.

    Args:
        device: the index of the GPU, which is the current device.
        form: the place in ``FORMS`` of the form to use, from 1 on.
        fields: the fields of :class:`~cudnn_autotune.norms.plan.NormProblem`, in their order.
    """
    problem = NormProblem(*fields)
    reason = unsupported_by_kernels(problem)
    if reason is not None:
        _C.count_fallback(f"batch norm: {reason}")
        return None
    capability = torch.cuda.get_device_capability(device)
    try:
        plan = plan_norm(problem, gpu_of(device), FORMS[form - 1])
        launches = [
            (
                cubin(one.kernel, capability),
                one.kernel.function,
                one.blocks,
                one.threads,
                one.shared_bytes,
            )
            for one in plan.launches
        ]
        return _C.NormPlan(
            launches,
            (plan.slabs, plan.parts, plan.tile),
            (plan.sums_bytes, plan.totals_bytes),
            counters=plan.counters,
            pointers=_POINTERS[problem.is_backward],
            floats=_FLOATS[problem.is_backward],
        )
    except _C.PlanError as error:
        _C.count_fallback(f"batch norm: {error}")
        return None
