"""The measured problems, and the choices for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]

# Each is of a real network; they are unlike in shape, op and size; float16, channels last.
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


def tiny(op: str, size: int = 8) -> Any:
    """1 x 16 x size x size, 16 filters of 3x3: its kernel takes less than the host needs."""
    import torch

    import cudnn_autotune as ca

    return ca.ConvProblem(
        op,
        (1, 16, size, size),
        (16, 16, 3, 3),
        padding=1,
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


def made(problem: Any, mode: str) -> Any:
    """The newest ``Choice`` of a problem in a mode; None where there is none."""
    import cudnn_autotune as ca

    found = [c for c in ca.choices() if (c.problem, c.sampling) == (problem, mode)]
    return found[-1] if found else None


def warm_up() -> None:
    """Pays what only a process's first call pays: context, libraries, cuDNN's handle."""
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.timers.measuring import operands, run_operator

    torch.manual_seed(0)
    for op in ("fprop", "dgrad", "wgrad"):
        problem = tiny(op, 9)
        data = operands(problem)
        run_operator(problem, data, "heuristic")
        torch.nn.functional.conv2d(data[0], data[1], padding=1)
    torch.cuda.synchronize()
    ca.forget()
