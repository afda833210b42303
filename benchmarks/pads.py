#!/usr/bin/env python
"""A pad in front of a convolution: what does it cost, next to the same layer with even padding?

Layers of decoders of videos and images, which pad unevenly: in time in front only, or by one more
at the end ("same" padding with a stride). Each way's call is captured in a CUDA graph, and the
graphs take turns in one process: PyTorch's pad and convolution, the same converted, and both with
as much padding on either side. Outputs have equal shapes.

    python benchmarks/pads.py --json pads.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import arguments, investigation
from models.turns import calibrate, captured, take_turns

DTYPES = ("bfloat16", "float16")
WAYS = ("eager", "eager, even", "converted", "converted, even")


@dataclass(frozen=True)
class Layer:
    """A convolution, and the pads in front of it, as of torch.nn.functional.pad."""

    input_shape: tuple[int, ...]
    filters: int
    kernel: int
    pads: tuple[int, ...]
    stride: int = 1

    def module(self, is_even: bool) -> Any:
        """Returns the pad and the convolution, or the convolution with even padding."""
        from torch import nn

        channels, spatial = self.input_shape[1], len(self.input_shape) - 2
        kind, pad = {2: (nn.Conv2d, nn.ZeroPad2d), 3: (nn.Conv3d, nn.ZeroPad3d)}[spatial]
        if not is_even:
            convolution = kind(channels, self.filters, self.kernel, stride=self.stride)
            return nn.Sequential(pad(self.pads), convolution)
        halves = [(a + b + 1) // 2 for a, b in zip(self.pads[-2::-2], self.pads[::-2], strict=True)]
        given = {"stride": self.stride, "padding": tuple(halves)}
        return nn.Sequential(kind(channels, self.filters, self.kernel, **given))


CAUSAL = (1, 1, 1, 1, 2, 0)
LAYERS = {
    "Wan, 96 channels": Layer((1, 96, 4, 480, 832), 96, 3, CAUSAL),
    "Wan, 192 channels": Layer((1, 192, 4, 240, 416), 192, 3, CAUSAL),
    "Wan, 384 channels": Layer((1, 384, 2, 120, 208), 384, 3, CAUSAL),
    "Qwen-Image, 384 channels": Layer((1, 384, 1, 256, 256), 384, 3, CAUSAL),
    "Stable Diffusion's encoder, 128 channels": Layer((1, 128, 512, 512), 128, 3, (0, 1, 0, 1), 2),
    "tf_efficientnetv2_b0, 16 to 64 channels": Layer((64, 16, 96, 96), 64, 3, (0, 1, 0, 1), 2),
}
TINY = {"tiny": Layer((1, 4, 2, 6, 6), 4, 3, CAUSAL)}


def measure(options: argparse.Namespace, case: str, failures: list[str]) -> Iterator[Any]:
    import torch

    from cudnn_autotune import convert

    layer = {**LAYERS, **TINY}[case]
    dtype = getattr(torch, options.dtype)
    last = torch.channels_last if len(layer.input_shape) == 4 else torch.channels_last_3d
    x = torch.randn(layer.input_shape, device=options.device).to(dtype, memory_format=last)
    replays: dict[str, Any] = {}
    errors: dict[str, float] = {}
    kept = []  # The graphs read the modules' memory.
    with torch.no_grad():
        for way in WAYS:
            is_even = way.endswith("even")
            torch.manual_seed(0)
            module = layer.module(is_even).to(options.device, dtype, memory_format=last).eval()
            wanted = module.double()(x.double())
            module.to(dtype)
            if way.startswith("converted"):
                module = convert(module, sampling="auto")
            found = module(x)
            errors[way] = ((found - wanted).norm() / wanted.norm()).item()
            kept.append(module)
            replays[way] = captured(partial(module, x), options.device)
    counts = calibrate(replays, options.block_ms, 0.3, options.device)
    times = take_turns(replays, counts, options.rounds, options.device)
    medians = {way: 1e3 * statistics.median(found) for way, found in times.items()}
    ratios = [a / b for a, b in zip(times["converted"], times["converted, even"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    yield {
        **{f"{way} (us)": medians[way] for way in WAYS},
        "eager / converted": medians["eager"] / medians["converted"],
        "converted / even": statistics.median(ratios),
        "quartiles": f"{quartiles[0]:.3f}, {quartiles[2]:.3f}",
        "error": max(errors.values()),
    }


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--layers", default="", help="comma-separated beginnings of names; all without")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument("--rounds", type=int, default=21, help="turns of each way; %(default)s")
    p.add_argument("--block-ms", type=float, default=5.0, help="of a turn; %(default)s")
    p.add_argument("--time-limit", type=float, default=200, help="seconds; no case begins later")
    options = p.parse_args()
    arguments.check_least(options, rounds=2)
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    named = LAYERS if options.device == "cuda" else TINY
    begins = tuple(part.strip() for part in options.layers.split(","))
    cases = [name for name in named if name.startswith(begins)]
    if not cases:
        sys.exit(f"--layers: no layer begins with {options.layers!r}; of: {'; '.join(named)}")
    title = f"A pad in front of a convolution, {options.dtype}, channels_last"
    return investigation.fill(__file__, options, cases, partial(measure, options), title)


tables = investigation.tables

if __name__ == "__main__":
    sys.exit(main())
