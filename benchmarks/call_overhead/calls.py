"""Host time of a small convolution: PyTorch's module and ours, block by block in turns."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from common import numbers
from common.modes import synchronize

from .columns import ENABLE

Call = Callable[[], Any]

WITH_GRADIENTS = (
    "forward",
    "forward_backward",
    "per_sample",
    "checkpoint",
    "norm_forward",
    "norm",
    "norm_act",
)


def context_of(name: str) -> AbstractContextManager[None]:
    import cudnn_autotune as ca

    return ca.enable() if name == ENABLE else nullcontext()


def enqueue_us(call: Call, calls: int, device: str) -> float:
    """Host time per call; the device is idle before, and no call waits for it inside. A block must
    launch well under the 1024 kernels or so that CUDA queues before a launch waits."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    end = time.perf_counter()
    synchronize(device)
    return (end - begin) / calls * 1e6


def blocks(
    calls: Mapping[str, Call], *, device: str, blocks: int, calls_per_block: int
) -> dict[str, list[float]]:
    """:func:`enqueue_us` of each call, one value a block; blocks take turns in random order."""
    source = random.Random(0)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name, call in calls.items():
        with context_of(name):
            enqueue_us(call, calls_per_block, device)
    gc.collect()
    gc.disable()  # a collection inside a block would be charged to one of the timed calls
    try:
        for _ in range(blocks):
            for name in source.sample(names, len(names)):
                with context_of(name):
                    times[name].append(enqueue_us(calls[name], calls_per_block, device))
    finally:
        gc.enable()
    return times


def compared(times: dict[str, list[float]], against: str) -> dict[str, Any]:
    """Medians, spreads and, paired block by block, ratios to the call `against`."""
    result: dict[str, Any] = {}
    for name, us in times.items():
        ratios = [a / b for a, b in zip(us, times[against], strict=True)]
        result[name] = {
            "us": numbers.spread(us),
            "ratio": numbers.significant(numbers.median(ratios)),
            "ratio_interval_95": [*map(numbers.significant, numbers.median_interval(ratios))],
        }
    return result


def module_calls(setting: str, modules: Mapping[str, Any], x: Any) -> dict[str, Call]:
    """The modules' calls in a setting: no_grad, forward (with grad) or forward_backward; the
    caller switches gradients off for no_grad, outside the blocks."""
    import torch

    if setting != "forward_backward":
        return {name: functools.partial(module, x) for name, module in modules.items()}
    grad_output = torch.randn_like(next(iter(modules.values()))(x).detach())

    def forward_backward(module: Any) -> Call:
        inputs = (x, *module.parameters())
        return lambda: torch.autograd.grad(module(x), inputs, grad_output)

    return {name: forward_backward(module) for name, module in modules.items()}


def modules_for(request: dict[str, Any], layout: Any) -> dict[str, Any]:
    """nn.Conv2d three times (an A/A pair, and one for :data:`ENABLE`) and ours, by the default mode
    and by an argument."""
    import torch

    import cudnn_autotune as ca

    c = request["shape"][1]
    device, dtype = request["device"], getattr(torch, request["dtype"])
    options = {"padding": request["kernel"] // 2, "bias": request["bias"]}

    def build(kind: Any, **more: Any) -> Any:
        module = kind(c, request["filters"], request["kernel"], **options, **more)
        return module.to(device=device, dtype=dtype, memory_format=layout)

    return {
        "pytorch": build(torch.nn.Conv2d),
        "pytorch, again": build(torch.nn.Conv2d),
        ENABLE: build(torch.nn.Conv2d),
        "ours": build(ca.Conv2d),
        "ours, sampling=": build(ca.Conv2d, sampling=request["sampling"]),
    }


def functional_calls(request: dict[str, Any], module: Any, x: Any) -> dict[str, Call]:
    import torch.nn.functional as F

    import cudnn_autotune as ca

    weight, bias = module.weight.detach(), module.bias
    bias = None if bias is None else bias.detach()
    padding = request["kernel"] // 2

    functions: dict[str, Any] = {
        "pytorch": F.conv2d,
        "pytorch, again": F.conv2d,
        ENABLE: F.conv2d,
        "ours": ca.functional.conv2d,
    }
    return {
        name: functools.partial(function, x, weight, bias, 1, padding)
        for name, function in functions.items()
    }


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record per layout and setting."""
    import torch

    import cudnn_autotune as ca

    from . import models

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    ca.set_sampling(request["sampling"])
    for name in request["layouts"]:
        layout = getattr(torch, "channels_last" if name == "channels_last" else "contiguous_format")
        x = torch.randn(*request["shape"], device=request["device"])
        x = x.to(getattr(torch, request["dtype"])).contiguous(memory_format=layout)
        modules = modules_for(request, layout)
        for setting in request["settings"]:
            per_block = request["calls"]
            if setting in models.SETTINGS:  # some fifty times the launches of a forward call
                calls = models.calls_of(setting, request, x, layout)
                per_block = max(1, per_block // 20)
            elif setting == "functional":
                calls = functional_calls(request, modules["pytorch"], x)
            else:
                needs_grad = setting == "forward_backward"
                calls = module_calls(setting, modules, x.clone().requires_grad_(needs_grad))
                if needs_grad:  # about eight times the launches of a forward call
                    per_block = max(1, per_block // 4)
            with torch.set_grad_enabled(setting in WITH_GRADIENTS):
                times = blocks(
                    calls,
                    device=request["device"],
                    blocks=request["blocks"],
                    calls_per_block=per_block,
                )
            yield {
                "layout": name,
                "setting": setting,
                "calls_per_block": per_block,
                "times": compared(times, "pytorch"),
            }
