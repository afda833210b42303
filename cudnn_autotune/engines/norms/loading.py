"""Plans of batch norms with their kernels compiled and loaded, for the operators on GPUs."""

from __future__ import annotations

from typing import Any

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.norms.plan import (
    FORMS,
    NormProblem,
    plan_norm,
    unsupported_by_kernels,
)
from cudnn_autotune.engines.offers import gpu_of

_POINTERS = {False: 11, True: 15}
"""The number of addresses that a forward's and a backward's kernel takes, with the workspace's."""


def load_plan(device: int, form: int, *fields: Any) -> _C.NormPlan | None:
    """Returns what computes a problem on a GPU, or None if PyTorch does.

    Args:
        device: the index of the GPU, which is the current device.
        form: the place in ``FORMS`` of the form to use, from 1 on; 0 for the best guess.
        fields: those of :class:`~cudnn_autotune.engines.norms.plan.NormProblem`, in their order.
    """
    problem = NormProblem(*fields)
    reason = unsupported_by_kernels(problem)
    if reason is not None:
        _C.count_fallback(f"batch norm: {reason}")
        return None
    capability = torch.cuda.get_device_capability(device)
    try:
        plan = plan_norm(problem, gpu_of(device), FORMS[form - 1] if form > 0 else None)
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
            cooperative=plan.is_cooperative,
            pointers=_POINTERS[problem.is_backward],
            takes_eps=not problem.is_backward,
        )
    except _C.PlanError as error:
        _C.count_fallback(f"batch norm: {error}")
        return None
