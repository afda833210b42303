"""Times programs that compute the same, taking turns, and compares their outputs."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Program = Callable[..., Any]

_WARMUP_CALLS = 3  # Inductor records a CUDA graph at the second call, and replays it at the third.
_ROUNDS = 7
_BATCH_MS = 20.0
_MOST_CALLS = 200

# How far the outputs of two correct programs may lie apart, as a norm-wise relative error. They
# are those of a deep network, in which rounding errors add up.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-2,  # TF32
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


@dataclass(frozen=True)
class Comparison:
    """What was measured of programs, by their names."""

    times_ms: Mapping[str, float]
    """Median time of a call."""
    wrong: Mapping[str, str]
    """Why the output of a program is not that of the first one. Those are not timed."""

    @property
    def fastest(self) -> str:
        return min(self.times_ms, key=self.times_ms.__getitem__)


def compare(programs: Mapping[str, Program], inputs: Sequence[Any]) -> Comparison:
    """Runs programs in turns on the same inputs, which they must not change.

    The first program is the reference for the outputs. The random number generators are afterwards
    what they were.

    Args:
        programs: what to call with ``*inputs``, by name.
        inputs: tensors (on one device) and other values.
    """
    devices = {value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    on_gpu = bool(devices)
    # The clone of an output outlives the replay of a CUDA graph that would overwrite it.
    outputs: dict[str, list[Tensor]] = {}
    indices = [device.index for device in devices]
    with torch.random.fork_rng(indices), torch.no_grad():
        for name, program in programs.items():
            torch.manual_seed(0)
            _new_step()
            results = [leaf for leaf in tree_leaves(program(*inputs)) if isinstance(leaf, Tensor)]
            outputs[name] = [result.detach().clone() for result in results]
        reference = next(iter(programs))
        differences = {
            name: difference(outputs[reference], outputs[name])
            for name in programs
            if name != reference
        }
        wrong = {name: text for name, text in differences.items() if text is not None}
        outputs.clear()
        right = {name: program for name, program in programs.items() if name not in wrong}
        times = time_in_turns(right, inputs, on_gpu)
    return Comparison(times, wrong)


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """Says how outputs differ by more than their dtype's rounding explains; None if they do not.

    Only floating-point outputs are compared by value: an index of the largest of equal values may
    be another one.
    """
    if len(expected) != len(actual):
        return f"it has {len(actual)} outputs, expected {len(expected)}"
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"output {index} is {tuple(other.shape)} of {other.dtype}, expected "
                f"{tuple(one.shape)} of {one.dtype}"
            )
        allowed = _TOLERANCES.get(one.dtype)
        if allowed is None or one.numel() == 0:
            continue
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return f"output {index} is not finite in other places"
        a, b = (torch.where(finite, tensor, 0).double() for tensor in (one, other))
        error = (torch.dist(a, b) / a.norm().clamp_min(1e-30)).item()
        if error > allowed:
            return f"output {index} has a relative error of {error:.2g}, allowed is {allowed:.2g}"
    return None


def _new_step() -> None:
    """Lets Inductor's CUDA graphs, if there are any, overwrite the outputs of the last call."""
    if "torch._inductor.cudagraph_trees" in sys.modules:  # importing it takes seconds
        torch.compiler.cudagraph_mark_step_begin()


def time_in_turns(
    programs: Mapping[str, Program], inputs: Sequence[Any], on_gpu: bool
) -> dict[str, float]:
    """The median time of a call of each program, in milliseconds, after some calls of each."""
    calls = {}
    for name, program in programs.items():
        for _ in range(_WARMUP_CALLS):
            _batch_ms(program, inputs, 1, on_gpu)
        once = max(_batch_ms(program, inputs, 1, on_gpu), 1e-3)
        calls[name] = max(1, min(math.ceil(_BATCH_MS / once), _MOST_CALLS))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for round in range(_ROUNDS):
        names = list(programs)
        for name in names if round % 2 else reversed(names):
            batch = _batch_ms(programs[name], inputs, calls[name], on_gpu)
            samples[name].append(batch / calls[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def _batch_ms(program: Program, inputs: Sequence[Any], calls: int, on_gpu: bool) -> float:
    """The time of some calls one after another, with what the host adds to it."""
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        _new_step()
        program(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
