"""One convolution, three directions: its tensors, PyTorch's call and this package's call.

Shapes are always those of the forward convolution: input (N, C, H, W), weight (K, C/groups, R, S).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

OPS = ("fprop", "dgrad", "wgrad")
DTYPES = ("float16", "bfloat16", "float32", "float64")
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer in one direction; `source` says where the layer comes from."""

    name: str
    op: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    dtype: str = "float16"
    channels_last: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op must be one of {OPS}, got {self.op!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        object.__setattr__(self, "weight_shape", tuple(self.weight_shape))

    @property
    def id(self) -> str:
        layout = "nhwc" if self.channels_last else "nchw"
        return f"{self.name}/{self.op}/{self.dtype}/{layout}"

    @property
    def output_shape(self) -> tuple[int, ...]:
        spatial = [
            (size + 2 * self.padding - self.dilation * (kernel - 1) - 1) // self.stride + 1
            for size, kernel in zip(self.input_shape[2:], self.weight_shape[2:], strict=True)
        ]
        return (self.input_shape[0], self.weight_shape[0], *spatial)

    def described(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def shrunk(self) -> Case:
        """A tiny float32 relative of the case, for a dry run on a CPU."""
        groups = min(self.groups, 4)
        per_group = max(1, min(self.input_shape[1] // self.groups, 8 // groups))
        kernels = groups * max(1, min(self.weight_shape[0] // self.groups, 8 // groups))
        reach = self.dilation * (max(self.weight_shape[2:]) - 1) + 1 - 2 * self.padding
        spatial = [max(min(s, 12), reach) for s in self.input_shape[2:]]
        return dataclasses.replace(
            self,
            input_shape=(min(self.input_shape[0], 2), groups * per_group, *spatial),
            weight_shape=(kernels, per_group, *self.weight_shape[2:]),
            groups=groups,
            dtype="float32",
        )


def from_described(described: dict[str, Any]) -> Case:
    return Case(**described)


@dataclasses.dataclass
class Tensors:
    input: Any
    weight: Any
    grad_output: Any


def tensors(case: Case, device: str) -> Tensors:
    """Random normal data, never zeros: zeros draw less power and run faster."""
    import torch

    dtype = getattr(torch, case.dtype)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    fan_in = case.weight_shape[1] * case.weight_shape[2] * case.weight_shape[3]

    def normal(shape: Sequence[int], scale: float = 1.0) -> Any:
        data = torch.randn(*shape, device=device, dtype=torch.float32) * scale
        return data.to(dtype).contiguous(memory_format=layout)

    return Tensors(
        normal(case.input_shape),
        normal(case.weight_shape, fan_in**-0.5),  # outputs of unit scale: no overflow in fp16
        normal(case.output_shape),
    )


def torch_call(case: Case, t: Tensors) -> Call:
    """PyTorch's own convolution in the case's direction, without autograd around it."""
    import torch

    if case.op == "fprop":
        return lambda: torch.nn.functional.conv2d(
            t.input, t.weight, None, case.stride, case.padding, case.dilation, case.groups
        )
    backward = torch.ops.aten.convolution_backward.default
    mask = [case.op == "dgrad", case.op == "wgrad", False]
    pairs = [[v, v] for v in (case.stride, case.padding, case.dilation)]
    wanted = 0 if case.op == "dgrad" else 1
    return lambda: backward(
        t.grad_output, t.input, t.weight, None, *pairs, False, [0, 0], case.groups, mask
    )[wanted]


def our_call(case: Case, t: Tensors, sampling: str) -> Call:
    """The package's op in the case's direction; the first call of a problem tunes it."""
    import torch

    ops = torch.ops.cudnn_autotune
    pairs = [[v, v] for v in (case.stride, case.padding, case.dilation)]
    tail = (*pairs, case.groups, sampling, -1)
    if case.op == "fprop":
        return lambda: ops.conv_fprop(t.input, t.weight, None, *tail)
    if case.op == "dgrad":
        return lambda: ops.conv_dgrad(t.grad_output, t.weight, list(case.input_shape), *tail)
    return lambda: ops.conv_wgrad(t.grad_output, t.input, list(case.weight_shape), *tail)


# PyTorch's modes: benchmark flag and benchmark_limit (0: every plan the heuristics list).
TORCH_MODES = {
    "pytorch_off": (False, 10),
    "pytorch_on_10": (True, 10),
    "pytorch_on_0": (True, 0),
}

# This package's sampling modes.
OUR_MODES = (
    "heuristic",
    "sample_once",
    "median_of_three",
    "till_stable",
    "race",
    "sustained",
    "auto",
)
MODES = (*TORCH_MODES, *OUR_MODES)


def set_torch_mode(mode: str) -> None:
    """Sets PyTorch's flags; only in a fresh process, since a seen shape is never re-tuned."""
    import torch

    benchmark, limit = TORCH_MODES[mode]
    torch.backends.cudnn.benchmark = benchmark
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark_limit = limit
