#!/usr/bin/env python
"""Do NaN and infinities make calls slower, as in a diverged run?

Each kernel of this package computes a layer. Its x (or dy, in a gradient) is finite, is full of NaN
or of infinities, or has few of them. The first offered tiling is timed.

    python benchmarks/not_finite.py --json not_finite.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from common import arguments, investigation

CALLS, ROUNDS = 20, 5
MOST = 1.5
"""The most that a time may be of the finite one."""
MOST_OF = {"few_channels_planes": 2.5}
"""The same of kernels that compute a tile with NaN again."""
LAYERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "depthwise": (("fprop", (64, 96, 56, 56), (3, 3), 2, 96),),
    "depthwise_1d": (("fprop", (8, 1536, 2048), (4,), 1, 1536),),
    "depthwise_mma": (
        ("fprop", (64, 96, 56, 56), (7, 7), 1, 96),
        ("dgrad", (64, 384, 14, 14), (7, 7), 1, 384),
    ),
    "depthwise_planes": (("fprop", (64, 96, 56, 56), (3, 3), 1, 96, "contiguous"),),
    "depthwise_wgrad": (
        ("wgrad", (64, 96, 112, 112), (3, 3), 2, 96),
        ("wgrad", (64, 384, 28, 28), (3, 3), 1, 384),
        ("wgrad", (64, 96, 30, 30), (3, 3), 1, 96),
        ("wgrad", (64, 96, 27, 27), (5, 5), 2, 96),
    ),
    "depthwise_wgrad_mma": (
        ("wgrad", (64, 96, 56, 56), (7, 7), 1, 96),
        ("wgrad", (64, 384, 14, 14), (7, 7), 1, 384),
        ("wgrad", (64, 768, 7, 7), (7, 7), 1, 768),
    ),
    "few_channels": (("fprop", (64, 3, 224, 224), (7, 7), 2, 1, 64),),
    "few_channels_planes": (("fprop", (64, 3, 224, 224), (7, 7), 2, 1, 64, "contiguous"),),
    "few_channels_wgrad": (
        ("wgrad", (64, 3, 224, 224), (7, 7), 2, 1, 64),
        ("wgrad", (8, 12, 512, 512), (3, 3), 1, 1, 12, "contiguous"),
    ),
    "few_filters": (
        ("fprop", (64, 128, 28, 28), (3, 3), 1, 1, 32),
        ("fprop", (1, 96, 4, 64, 128), (3, 3, 3), 1, 1, 96),
    ),
    "grouped": (
        ("fprop", (64, 128, 56, 56), (3, 3), 1, 32),
        ("dgrad", (64, 128, 56, 56), (3, 3), 1, 32),
        ("dgrad", (64, 160, 28, 28), (3, 3), 2, 40),
        ("fprop", (64, 96, 28, 28), (3, 3), 1, 8),
    ),
    "grouped_wgrad": (("wgrad", (64, 128, 56, 56), (3, 3), 1, 32),),
    "implicit_gemm_1d": (("fprop", (8, 768, 1, 1500), (1, 128), 1, 16),),
    "implicit_gemm_1d_wgrad": (
        ("wgrad", (8, 768, 1, 1500), (1, 128), 1, 16),
        ("wgrad", (16, 1024, 1, 1024), (1, 31), 1, 32),
        ("wgrad", (8, 512, 1, 16384), (1, 3), 1, 4),
    ),
}
"""Kernel -> the operation, x, the filters' size, stride, groups, output channels (default: input
channels) and layout (default: channels_last)."""


def patterns() -> dict[str, Callable[[Any], None]]:
    """Returns column -> the function that gives a tensor of normal numbers this pattern."""
    import torch

    def one_a_channel(tensor: Any) -> None:
        tensor[(0, slice(None), *(0 for _ in tensor.shape[3:]), 5)] = torch.inf

    return {
        "finite": lambda tensor: None,
        "all NaN": lambda tensor: tensor.fill_(torch.nan),
        "all infinite": lambda tensor: tensor.fill_(torch.inf),
        "both infinities": lambda tensor: tensor.copy_(tensor.sign() * torch.inf),
        "one infinity a channel": one_a_channel,
        "one NaN": lambda tensor: tensor[(-1,) * tensor.dim()].fill_(torch.nan),
    }


def problem_of(op: str, x: Any, kernel: Any, stride: int, groups: int, *more: Any) -> Any:
    import torch

    from cudnn_autotune.engines.problem import ConvProblem

    filters = next((one for one in more if isinstance(one, int)), x[1])
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = None if "contiguous" in more else last.get(len(x))
    return ConvProblem(
        op,
        x,
        (filters, x[1] // groups, *kernel),
        stride if len(kernel) == 1 or kernel[0] > 1 else (1, stride),
        tuple(size // 2 for size in kernel),
        groups=groups,
        dtype=torch.float16,
        memory_format=layout or torch.contiguous_format,
    )


def microseconds(plan: Any, tensors: list[Any]) -> float:
    """Returns the microseconds of a call, the median of the rounds."""
    from cudnn_autotune import _C
    from cudnn_autotune.timers.stopwatch import Stopwatch

    found = []
    for _ in range(ROUNDS):
        with Stopwatch() as watch:
            for _ in range(CALLS):
                _C.execute(plan, *tensors)
        found.append(1e3 * watch.ms() / CALLS)
    return statistics.median(found)


def measure(name: str, failures: list[str]) -> Iterator[investigation.Row]:
    import torch

    from cudnn_autotune import _C
    from cudnn_autotune.engines.offers import gpu_of
    from cudnn_autotune.engines.recipe_plan import recipe_plan
    from cudnn_autotune.kernels.built_in import BUILT_IN
    from cudnn_autotune.timers.measuring import operands

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device.index)
    (family,) = (one for one in BUILT_IN if one.name == name)
    for layer in LAYERS[name]:
        problem = problem_of(*layer)
        offers = family.offers(problem, gpu)
        if not offers:
            failures.append(f"{name}: nothing is offered for {problem.text}")
            continue
        text = f"{name}@{family.version}:{offers[0].settings}"
        recipe = family.recipe(problem, offers[0].settings, gpu)
        plan = recipe_plan(problem, text, recipe, device.index)
        row: investigation.Row = {"layer": problem.text}
        for column, spoil in patterns().items():
            tensors = list(operands(problem, device))
            spoil(tensors[0 if problem.op == "fprop" else 2])
            _C.execute(plan, *tensors)
            row[f"{column} (us)"] = microseconds(plan, tensors)
        finite = row["finite (us)"]
        worst = max(value for key, value in row.items() if key.endswith("(us)"))
        row["most / finite"] = worst / finite
        if worst > MOST_OF.get(name, MOST) * finite:
            failures.append(f"{name}: {worst / finite:.2f} times the finite time: {problem.text}")
        yield row


def main() -> int:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument(
        "--time-limit", type=float, default=85, help="seconds before the last kernel begins"
    )
    p.add_argument("--kernels", help="comma-separated; all without it")
    options = p.parse_args()
    names = list(LAYERS)
    if options.kernels:
        names = arguments.some_of("--kernels", options.kernels, LAYERS)
    arguments.check_gpu(__file__)
    import torch

    torch.manual_seed(0)
    return investigation.fill(__file__, options, names, measure, "NaN and infinities")


if __name__ == "__main__":
    sys.exit(main())
