"""PyTorch's operator as it is and while ``enable()`` is in force, block by block in turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import numbers, profiled
from common.modes import synchronize

from .layers import Layer

WAYS = ("pytorch", "auto")
# Microseconds a call for which the device sleeps while the host launches a block.
_HOST_US = 200
_BLOCK_MS, _MOST_CALLS = 1.0, 40
_ROUNDS, _LEAST_ROUNDS = 12, 4
_MOST_MS = 400.0  # of all blocks of a case, unless the least rounds take longer
_MORE = 3  # times as many rounds where a case is measured once more
_COLD_BYTES = 200 << 20  # of the copies of a call's tensors that take turns: four L2 caches

Call = Callable[[], Any]


def call_of(layer: Layer, device: str) -> Call:
    """A call of ``aten::convolution`` or of its backward, on random data."""
    import torch

    n = layer.spatial_dims
    dtype = getattr(torch, layer.dtype)
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(n)

    def data(shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
        if layer.channels_last and last is not None:
            return tensor.contiguous(memory_format=last)
        return tensor

    x, w = data(layer.input_shape), data(layer.weight_shape)
    geometry = (layer.stride, layer.padding, layer.dilation, layer.transposed, (0,) * n)
    if layer.op == "forward":
        forward = torch.ops.aten.convolution
        return lambda: forward(x, w, None, *geometry, layer.groups)
    backward = torch.ops.aten.convolution_backward
    grad_output = data(layer.output_shape)
    mask = [layer.op == "dgrad", layer.op == "wgrad", False]
    return lambda: backward(grad_output, x, w, None, *geometry, layer.groups, mask)


def calls_with_cold_operands(layer: Layer, device: str) -> Call:
    """The call on one of many sets of tensors after the other, none of which the L2 cache holds
    still, as far as it was not written last."""
    count = max(2, math.ceil(_COLD_BYTES / layer.bytes))
    calls = itertools.cycle([call_of(layer, device) for _ in range(min(count, _MOST_CALLS))])
    return lambda: next(calls)()


@contextlib.contextmanager
def served(way: str) -> Iterator[None]:
    """PyTorch's convolutions run by PyTorch, or by ``auto``'s choices."""
    import cudnn_autotune as ca

    if way == "auto":
        with ca.enable("auto"):
            yield
    else:
        ca.disable()
        yield


def block_ms(call: Call, way: str, count: int, device: str) -> float:
    """Milliseconds a call, of ``count`` one after the other: the GPU's time, or the host's on a
    CPU."""
    with served(way):
        if device == "cpu":
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begin) * 1e3 / count
        from cudnn_autotune.timers.stopwatch import Stopwatch, occupy

        occupy(1e-6 * _HOST_US * count)
        with Stopwatch() as watch:
            for _ in range(count):
                call()
        return watch.ms() / count


def in_turns(
    call: Call, counts: dict[str, int], rounds: int, device: str, seed: int
) -> dict[str, list[float]]:
    """Milliseconds a call of each way, round by round; the order of a round is random."""
    source = random.Random(seed)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in source.sample(WAYS, len(WAYS)):
            times[way].append(block_ms(call, way, counts[way], device))
    return times


def first_ms(call: Call, way: str, device: str) -> float:
    """Milliseconds of the first call, in which the way looks for an engine."""
    synchronize(device)
    begin = time.perf_counter()
    with served(way):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def chosen_since(known: int) -> str | None:
    """The text of the last choice after the first ``known``; None where there is none."""
    import cudnn_autotune as ca

    made = ca.choices()[known:]
    return made[-1].text if made else None


def kernels_of(call: Call, way: str) -> str:
    """The names of the kernels that a call runs on the GPU, as far as a profiler sees them."""
    with served(way):
        return ", ".join(sorted(kernel.name for kernel in profiled.kernels_of(call)))


def measure(layer: Layer, device: str, worse_than: float) -> dict[str, Any]:
    """Measures both ways; returns the row of the table without the case's name.

    Where PyTorch's time over that of ``auto`` is below ``worse_than``, both are measured once more
    with more rounds, and only that counts. What is below it then is measured with cold operands
    too, for which ``auto`` chooses.
    """
    import cudnn_autotune as ca

    call = call_of(layer, device)
    known = len(ca.choices())
    # PyTorch comes first: it must not find an engine that a search has loaded.
    first = {way: first_ms(call, way, device) for way in WAYS}
    engine = chosen_since(known)
    once = {way: min(block_ms(call, way, 1, device) for _ in range(2)) for way in WAYS}
    counts = {
        way: max(1, min(_MOST_CALLS, round(_BLOCK_MS / max(ms, 1e-3)))) for way, ms in once.items()
    }
    round_ms = sum(counts[way] * once[way] for way in WAYS)
    rounds = max(_LEAST_ROUNDS, min(_ROUNDS, int(_MOST_MS / round_ms)))
    times = in_turns(call, counts, rounds, device, seed=0)
    measured = 1
    if ratio_of(times) < worse_than:
        times = in_turns(call, counts, _MORE * rounds, device, seed=1)
        measured = 2
    ratios = [a / b for a, b in zip(times["pytorch"], times["auto"], strict=True)]
    low, high = numbers.median_interval(ratios)
    is_worse = ratio_of(times) < worse_than
    is_shown = is_worse and device == "cuda"
    cold = None
    if is_worse:
        cold_call = calls_with_cold_operands(layer, device)
        cold = ratio_of(in_turns(cold_call, counts, _MORE * rounds, device, seed=2))
    return {
        "kind": layer.kind,
        "op": layer.op,
        "PyTorch (us)": numbers.significant(1e3 * numbers.median(times["pytorch"])),
        "auto (us)": numbers.significant(1e3 * numbers.median(times["auto"])),
        "PyTorch over auto": numbers.significant(ratio_of(times)),
        "least": numbers.significant(low),
        "most": numbers.significant(high),
        "times measured": measured,
        "PyTorch over auto, cold operands": numbers.significant(cold) if cold else None,
        "first call of PyTorch (ms)": numbers.significant(first["pytorch"]),
        "first call of auto (ms)": numbers.significant(first["auto"]),
        "engine": engine,
        "PyTorch's kernels": kernels_of(call, "pytorch") if is_shown else None,
        "kernels of auto": kernels_of(call, "auto") if is_shown else None,
    }


def ratio_of(times: dict[str, list[float]]) -> float:
    """PyTorch's time over that of ``auto``: the median over the rounds."""
    ratios = [a / b for a, b in zip(times["pytorch"], times["auto"], strict=True)]
    return numbers.median(ratios)
