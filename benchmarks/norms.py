#!/usr/bin/env python
"""Batch norm, plus a residual, then an activation, forward and backward: how many passes?

Each way's step is captured in a CUDA graph, and the graphs take turns in one process. A pass is the
time that one reading of the tensor takes at --bandwidth. "ours" is the form that the planner
chooses; its forward is timed by itself too, and its forms can be timed beside it (--ways). "cudnn"
is the fastest of cuDNN's own engines for norms; it needs the package nvidia-cudnn-frontend.
"synchronised" are the kernels of torch.nn.SyncBatchNorm, without what ranks exchange.
Errors are relative to a computation in float64.

    python benchmarks/norms.py --json norms.json
    python benchmarks/norms.py --shapes 64x256x56x56+add --ways "ours,ours: kept,ours: two passes"
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from common import arguments, investigation
from models.turns import calibrate, captured, take_turns

SHAPES = (
    "64x64x56x56,64x256x56x56+add,64x512x28x28+add,64x256x14x14,64x1024x14x14+add,64x2048x7x7+add"
)
FORMS = {"ours": 0, "ours: kept": 1, "ours: half kept": 2, "ours: two passes": 3}
"""The ways that are this package's, with the form that they set."""
WAYS = ("eager", "compile", "cudnn", "synchronised", *FORMS)
DTYPES = ("bfloat16", "float16", "float32")
EPS = 1e-5

Step = Callable[[], Any]
Norm = Callable[..., Any]


def parsed(shape: str) -> tuple[tuple[int, ...], bool]:
    """``"64x256x14x14+add"`` as the shape, and whether a residual is added; exits if it is none."""
    found = re.fullmatch(r"(\d+(?:x\d+){1,4})(\+add)?", shape.strip())
    if found is None:
        sys.exit(f"--shapes: {shape!r} is no shape such as 64x256x14x14 or 64x256x14x14+add")
    return tuple(map(int, found[1].split("x"))), found[2] is not None


def operands(options: argparse.Namespace, shape: tuple[int, ...], adds: bool) -> dict[str, Any]:
    """Random tensors on the device: of PyTorch's batch norm, and the gradient of the output."""
    import torch

    dtype = getattr(torch, options.dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def random() -> Any:
        values = torch.randn(shape, device=options.device).to(dtype)
        if options.layout == "channels_last" and len(shape) in formats:
            values = values.contiguous(memory_format=formats[len(shape)])
        return values

    def parameter() -> Any:
        return torch.rand(shape[1], device=options.device) + 0.5

    given = {"input": random(), "weight": parameter(), "bias": parameter()}
    if adds:
        given["residual"] = random()
    for values in given.values():
        values.requires_grad_()
    return {**given, "grad_output": random()}


def by_pytorch(activation: str) -> Norm:
    from torch.nn.functional import batch_norm

    from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

    activate = NORM_ACTIVATIONS[activation].forward

    def norm(input: Any, weight: Any, bias: Any, residual: Any | None = None) -> Any:
        z = batch_norm(input, None, None, weight, bias, training=True, eps=EPS)
        return activate(z if residual is None else z + residual)

    return norm


def by_synchronised(activation: str) -> Norm:
    import torch

    from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

    activate = NORM_ACTIVATIONS[activation].forward

    class Synchronised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> Any:
            mean, inv_std = torch.batch_norm_stats(input, EPS)
            ctx.save_for_backward(input, weight, mean, inv_std)
            return torch.batch_norm_elemt(input, weight, bias, mean, inv_std, EPS)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            input, weight, mean, inv_std = ctx.saved_tensors
            given = (grad, input, mean, inv_std, weight)
            *sums, grad_weight, grad_bias = torch.batch_norm_backward_reduce(*given, *[True] * 3)
            count = torch.full_like(mean[:1], input.numel() // len(mean), dtype=torch.int32)
            return torch.batch_norm_backward_elemt(*given, *sums, count), grad_weight, grad_bias

    def norm(input: Any, weight: Any, bias: Any, residual: Any | None = None) -> Any:
        z = Synchronised.apply(input, weight, bias)
        return activate(z if residual is None else z + residual)

    return norm


def by_operators(activation: str) -> Norm:
    import torch

    def norm(input: Any, weight: Any, bias: Any, residual: Any | None = None) -> Any:
        operator = torch.ops.cudnn_autotune.batch_norm_act
        return operator(input, weight, bias, residual, activation, EPS)[0]

    return norm


def step_of(function: Norm, given: dict[str, Any]) -> Step:
    """A forward and a backward; it returns the output and the gradients."""
    import torch

    leaves = [values for name, values in given.items() if name != "grad_output"]

    def step() -> list[Any]:
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, given["grad_output"])]

    return step


def forward_of(function: Norm, given: dict[str, Any]) -> Step:
    leaves = [values for name, values in given.items() if name != "grad_output"]
    return lambda: function(*leaves)


def worst_error(step: Step, exact: list[Any]) -> float:
    """The largest relative error of the output and the gradients."""
    errors = []
    for found, wanted in zip(step(), exact, strict=True):
        errors.append(((found.double() - wanted).norm() / wanted.norm()).item())
    return max(errors)


def measure(options: argparse.Namespace, case: str, failures: list[str]) -> Iterator[Any]:
    import torch
    from common.cudnn_norms import CudnnNorm

    from cudnn_autotune.core.extension import _C, extension_available

    shape, adds = parsed(case)
    given = operands(options, shape, adds)
    pytorchs, ours = by_pytorch(options.activation), by_operators(options.activation)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    exact = [t.detach() for t in step_of(pytorchs, wide)()]
    del wide
    torch._dynamo.reset()
    functions = {
        "eager": pytorchs,
        "compile": torch.compile(pytorchs, dynamic=False),
        "synchronised": by_synchronised(options.activation),
        **dict.fromkeys(FORMS, ours),
    }
    replays: dict[str, Step] = {}
    errors: dict[str, float] = {}
    for way in options.ways:
        if extension_available():
            _C.set_norm_form(FORMS.get(way, 0))
        try:
            if way == "cudnn":
                engines = CudnnNorm(given)
                print(f"{case}: {engines.plans}", file=sys.stderr)
                step = engines.step
            else:
                step = step_of(functions[way], given)
            errors[way] = worst_error(step, exact)
            replays[way] = captured(step, options.device)
            forward = engines.forward if way == "cudnn" else None
            if way in FORMS:
                forward = forward_of(functions[way], given)
            if forward is not None:
                with torch.no_grad():
                    replays[f"{way}, forward"] = captured(forward, options.device)
        except Exception as error:  # the other ways still count
            replays.pop(way, None)
            failures.append(f"{case}: {way}: {type(error).__name__}: {error}".splitlines()[0])
    if extension_available():
        _C.set_norm_form(0)
    del exact
    counts = calibrate(replays, options.block_ms, options.warm_up_s, options.device)
    times = take_turns(replays, counts, options.rounds, options.device)
    pass_us = given["input"].nbytes / options.bandwidth / 1e6
    medians = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    for way in options.ways:
        if way not in medians:
            continue
        forward = medians.get(f"{way}, forward")
        yield {
            "way": way,
            "us": medians[way],
            "forward (us)": forward,
            "passes": medians[way] / pass_us,
            "forward passes": None if forward is None else forward / pass_us,
            "over ours": None if "ours" not in medians else medians[way] / medians["ours"],
            "error": errors[way],
        }


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--shapes", default=SHAPES, help="%(default)s")
    p.add_argument("--ways", default="eager,compile,ours", help=f"of: {','.join(WAYS)}")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument("--layout", choices=("channels_last", "contiguous"), default="channels_last")
    p.add_argument("--activation", default="relu")
    p.add_argument("--bandwidth", type=float, default=3.0, help="TB/s of a pass; %(default)s")
    p.add_argument("--rounds", type=int, default=21, help="turns of each way; %(default)s")
    p.add_argument("--block-ms", type=float, default=5.0, help="of a turn; %(default)s")
    p.add_argument("--warm-up-s", type=float, default=0.5, help="before the turns; %(default)s")
    p.add_argument("--time-limit", type=float, default=500, help="seconds; no case begins later")
    options = p.parse_args()
    cases = [shape.strip() for shape in options.shapes.split(",")]
    for case in cases:
        parsed(case)
    options.ways = arguments.some_of("--ways", options.ways, WAYS)
    arguments.check_least(options, rounds=1)
    if not (math.isfinite(options.bandwidth) and options.bandwidth > 0):
        sys.exit(f"--bandwidth must be above 0, got {options.bandwidth}")
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    import torch

    from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

    arguments.some_of("--activation", options.activation, NORM_ACTIVATIONS)
    if "cudnn" in options.ways and (options.activation != "relu" or options.dtype == "float32"):
        sys.exit('--ways: "cudnn" is for ReLU in float16 or bfloat16')
    torch.manual_seed(0)
    title = f"Batch norm and {options.activation}, {options.dtype}, {options.layout}: passes"
    return investigation.fill(__file__, options, cases, partial(measure, options), title)


tables = investigation.tables

if __name__ == "__main__":
    sys.exit(main())
