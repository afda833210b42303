"""Runs a model of timm before and after conversion, and compares outputs and times.

``convert`` may change the layout of the model, too. So PyTorch is timed in both layouts, and what
the package's engines gain is told apart from what the layout does.

    pip install timm
    python examples/infer_timm.py tf_efficientnet_b0
    python examples/infer_timm.py resnetv2_50x1_bit --batch 64

Both of these have convolutions with a forward of their own (Conv2dSame, StdConv2d).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import timm
import torch
from torch import Tensor, nn

import cudnn_autotune


def timed(model: nn.Module, images: Tensor, steps: int) -> tuple[Tensor, float]:
    """The outputs, and the milliseconds of a step after a first one."""
    model(images)
    outputs = model(images)
    synchronize(images.device)
    begin = time.perf_counter()
    for _ in range(steps):
        model(images)
    synchronize(images.device)
    return outputs, (time.perf_counter() - begin) * 1e3 / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tf_efficientnet_b0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    dtype = torch.float16 if options.device == "cuda" else torch.float32
    model = timm.create_model(options.model).to(options.device, dtype).eval()
    images = torch.randn(options.batch, 3, options.size, options.size)
    images = images.to(options.device, dtype)
    with torch.inference_mode():
        expected, before_ms = timed(model, images, options.steps)
        cudnn_autotune.convert(model, memory_format="auto", example_input=images)
        found, after_ms = timed(model, images, options.steps)
        report = cudnn_autotune.conversion(model)
        cudnn_autotune.revert(model)  # the layout stays
        _, laid_out_ms = timed(model, images, options.steps)
    print(report)
    print(dict(Counter(report.served.values())))
    error = float((found - expected).float().norm() / expected.float().norm())
    print(
        f"ms a step: {before_ms:.2f} by PyTorch, {laid_out_ms:.2f} by PyTorch in that layout, "
        f"{after_ms:.2f} with this package; outputs differ by {error:.1e}"
    )
    if options.device == "cpu":
        print("on a CPU this package runs PyTorch's convolutions: it gains nothing but the layout")


if __name__ == "__main__":
    main()
