"""A lower bound of the time of PyTorch's own path of a fused problem."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MOST_BY_PYTORCH, timed_by_pytorch
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.screening import SLOW
from cudnn_autotune.tuning import choice_log

# The most bytes that a multiprocessor reads from or writes to the L2 cache in a clock.
_L2_BYTES_A_CLOCK = 64
# The least time between the begins of two kernels in a stream.
_LAUNCH_MS = 1e-3


def floor_ms(problem: ConvProblem, policy: Policy, device: int) -> float | None:
    """Returns the least time in milliseconds of PyTorch's own path.

    After its convolution run kernels for the residual, the activation and, behind an engine of
    cuDNN, the bias. Each reads and writes the result once more.

    Args:
        policy, device: as of ``choice_log.find``.

    Returns:
        The time; None if this process has not timed the convolution alone, with all engines that
        PyTorch may run for it. PyTorch's engines keep to no workspace limit, and write to dense
        memory.
    """
    is_limited = policy.benchmark or policy.workspace is not None or problem.pixel_strides
    if not (problem.residual or problem.activation) or is_limited:
        return None
    alone = replace(problem, bias=False, residual=False, activation="")
    known = choice_log.find(alone, policy, device)
    if known is None or known.searched is None or known.lacking:
        return None
    evidence, pytorchs = known.searched.evidence, _of_pytorch(alone, known.searched)
    # A search that was cut short claims no regret bound: it has left engines out, or hardly timed
    # them.
    if pytorchs is None or evidence.regret_bound is None:
        return None
    # One launch may have been disturbed; the screening allows as much.
    alone_ms = min(one.low_ms or (one.time_ms or math.inf) / SLOW for one in pytorchs)
    gpu = torch.cuda.get_device_properties(device)
    clock_khz = getattr(gpu, "clock_rate", None)  # older versions of PyTorch lack it
    if not clock_khz or not evidence.clock_mhz:
        return None
    alone_ms *= min(1.0, 1e3 * evidence.clock_mhz / clock_khz)  # it may be higher by now
    bytes_a_ms = _L2_BYTES_A_CLOCK * gpu.multi_processor_count * clock_khz
    adds_bias = problem.bias and any(one.runs for one in pytorchs)
    # Reads and writes of the result, by each kernel behind the convolution.
    passes = [2] * adds_bias + [3] * problem.residual + [2] * (problem.activation != "")
    moved = sum(passes) * math.prod(problem.output_shape) * problem.dtype.itemsize
    return alone_ms + len(passes) * _LAUNCH_MS + moved / bytes_a_ms


def _of_pytorch(alone: ConvProblem, selection: Selection) -> list[Measurement] | None:
    """Returns the measurements of all candidates that PyTorch may run for a convolution: its own
    path and all engines of cuDNN. The package's kernels are among them only if the mode may have
    left out slower engines because of them. None if not all were timed."""
    measured = {one.candidate: one for one in selection.ranking}
    engines = sorted((c for c in measured if c.engine is not None), key=lambda c: c.place)
    timed = timed_by_pytorch(alone, engines)
    if any(c not in measured or measured[c].time_ms is None for c in [*timed, OWN_PATH]):
        return None
    # No engine was left out if all places are there, from the first of mode A on.
    if [c.place for c in timed] != [(0, rank) for rank in range(MOST_BY_PYTORCH)]:
        return list(selection.ranking)
    return [measured[c] for c in (*engines, OWN_PATH)]
