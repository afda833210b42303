"""Which problems, and the package's call of each."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Call = Callable[[], Any]

# Of a real network each, unlike in shape, op and size; float16, channels last.
FIRST_CALL = (
    "resnet50_layer3_3x3/fprop/float16",
    "convnext_t_down3/dgrad/float16",
    "efficientnetv2_s_stage2_project/wgrad/float16",
    "yolov8l_c2f4_3x3/fprop/float16",
)
CONVERGENCE = (
    "resnet50_layer1_1x1/fprop/float16",
    "resnet50_layer3_3x3/fprop/float16",
    "resnet50_layer2_3x3_stride2/dgrad/float16",
    "resnet50_layer4_3x3/wgrad/float16",
    "efficientnetv2_s_stage2_fused/fprop/float16",
    "efficientnetv2_s_stage5_depthwise/fprop/float16",
    "convnext_t_down3/dgrad/float16",
    "sd_unet_down_640/fprop/float16",
    "sd_unet_down_1280/wgrad/float16",
    "yolov8l_c2f4_join/dgrad/float16",
    "yolov8l_head_class_batch1/fprop/float16",
    "vae_decoder_mid_512/wgrad/float16",
)

# Those whose pick was 2.6 to 6.8 % behind in batches (benchmarks/results/h200/online.json, of
# 2026-11-21), and two whose pick was not.
TURNS = (
    "vae_decoder_mid_512/wgrad/float16",
    "resnet50_layer4_3x3/wgrad/float16",
    "resnet50_layer1_1x1/fprop/float16",
    "sd_unet_down_640/fprop/float16",
    "convnext_t_down3/dgrad/float16",
)


def wanted(path: Path, texts: tuple[str, ...], option: str, *, seed: int = 0) -> list[Any]:
    """The first case of a layer list with each text in its id, in a fixed random order: what a
    time limit cuts off is then no choice."""
    from cudnn_autotune.audit.layers import load

    try:
        known = load(path)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    found: dict[str, Any] = {}
    for text in texts:
        fitting = [case for case in known if text in case.id]
        if not fitting:
            sys.exit(f"{option}: no case of {path.name} has {text!r} in its id")
        found[fitting[0].id] = fitting[0]
    cases = list(found.values())
    random.Random(seed).shuffle(cases)
    return cases


def tiny(op: str, size: int = 8, dtype: str = "float16") -> Any:
    """1 x 16 x size x size, 16 filters of 3x3: its kernel takes less than the host needs."""
    import torch

    import cudnn_autotune as ca

    return ca.ConvProblem(
        op,
        (1, 16, size, size),
        (16, 16, 3, 3),
        padding=1,
        dtype=getattr(torch, dtype),
        memory_format=torch.channels_last,
    )


def of_case(case: dict[str, Any], device: str) -> Any:
    """The case's problem; in a dry run a tiny one of its op."""
    from cudnn_autotune.audit.layers import Case

    return tiny(case["op"], 12, "float32") if device == "cpu" else Case(**case).problem()


def our_call(problem: Any, data: tuple[Any, Any, Any], mode: str) -> Call:
    """The package's op; the first call of a problem chooses."""
    import torch

    x, w, y = data
    ops = torch.ops.cudnn_autotune
    tail = (problem.stride, problem.padding, problem.dilation, problem.groups, mode, -1)
    if problem.op == "fprop":
        return lambda: ops.conv_fprop(x, w, None, *tail)
    if problem.op == "dgrad":
        return lambda: ops.conv_dgrad(y, w, problem.input_shape, *tail)
    return lambda: ops.conv_wgrad(y, x, problem.weight_shape, *tail)


def warm_up(device: str) -> None:
    """What only a process's first call pays: context, libraries, cuDNN's handle."""
    import torch
    from common.timing import synchronize

    import cudnn_autotune as ca
    from cudnn_autotune.timers.measuring import operands

    for op in ("fprop", "dgrad", "wgrad"):
        problem = tiny(op, 9, "float32" if device == "cpu" else "float16")
        data = operands(problem, device)
        our_call(problem, data, "heuristic")()
        torch.nn.functional.conv2d(data[0], data[1], padding=1)
    synchronize(device)
    ca.forget()


def measured(
    request: dict[str, Any],
    of_simulation: Callable[[str], dict[str, Any]],
    of_gpu: Callable[[Any, float], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """One record a case of ``request``, as far as its seconds reach; one that fails says why.

    Args:
        of_simulation: of an op, in a dry run.
        of_gpu: of a problem, and the moment (``time.monotonic``) by which it should end.
    """
    import torch

    import cudnn_autotune as ca

    device = request["device"]
    end = time.monotonic() + request["seconds"]
    torch.manual_seed(0)
    warm_up(device)
    for name, case in request["cases"].items():
        if time.monotonic() > end:
            return
        if device == "cpu":
            yield {"case": name, **of_simulation(case["op"])}
            continue
        try:
            yield {"case": name, **of_gpu(of_case(case, device), min(end, time.monotonic() + 15))}
        except (torch.OutOfMemoryError, ca.CudnnError) as error:
            yield {"case": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        ca.forget()
        torch.cuda.empty_cache()
