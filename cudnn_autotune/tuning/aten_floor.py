"""Bounds the time of PyTorch's own path of a fused problem from below."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import Policy
from cudnn_autotune.tuning import choice_log

# Bytes that a multiprocessor reads from or writes to the L2 cache in a clock, at most.
_L2_BYTES_A_CLOCK = 64
# Time between the begins of two kernels in a stream, at least.
_LAUNCH_MS = 1e-3


def floor_ms(problem: ConvProblem, policy: Policy, device: int) -> float | None:
    """Returns a time in milliseconds that PyTorch's own path takes at least.

    What adds a residual or applies an activation runs behind its convolution, and reads and writes
    the result once more.

    Args:
        policy, device: as of ``choice_log.find``.

    Returns:
        The time; None if the convolution alone has not been timed in this process, with all that
        PyTorch may run for it: what it runs keeps to no workspace limit, and writes to dense
        memory.
    """
    is_limited = policy.benchmark or policy.workspace is not None or problem.pixel_strides
    if not (problem.residual or problem.activation) or is_limited:
        return None
    alone = replace(problem, bias=False, residual=False, activation="")
    known = choice_log.find(alone, policy, device)
    if known is None or known.origin != "tuned" or known.lacking or known.chosen is None:
        return None
    alone_ms, evidence = known.chosen.low_ms or known.time_ms, known.selection.evidence
    if alone_ms is None or evidence.budget_ms is not None:  # it cut the search short
        return None
    if evidence.clock_mhz and evidence.max_clock_mhz:  # the clock may be higher by now
        alone_ms *= min(1.0, evidence.clock_mhz / evidence.max_clock_mhz)
    gpu = torch.cuda.get_device_properties(device)
    clock_khz = getattr(gpu, "clock_rate", None)  # older versions of PyTorch do not say it
    if not clock_khz:
        return None
    bytes_a_ms = _L2_BYTES_A_CLOCK * gpu.multi_processor_count * clock_khz
    moved = (2 + problem.residual) * math.prod(problem.output_shape) * problem.dtype.itemsize
    return alone_ms + _LAUNCH_MS + moved / bytes_a_ms
