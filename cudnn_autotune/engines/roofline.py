"""The roofline: the least time that a convolution can take on a GPU, and what binds it.

Williams, Waterman and Patterson, *Roofline*, Communications of the ACM 52(4), 2009. The limit holds
for a direct convolution. Every element of ``touched(problem)`` is read from DRAM or written to it
once, and every product is computed once. Two kinds of calls can be faster: Winograd's and Fourier's
algorithms multiply less often, and tensors in the L2 cache need no DRAM.

Elements are counted, not the 32-byte sectors of DRAM's transfers, and activations' operations are
not counted. So a strided problem's true limit may be higher.

A type's rate is the rate of the fastest unit that computes it without rounding the operands
further. Tensor cores count at their full rate for depthwise convolutions and narrow groups too.
They can compute these as products with banded matrices (Chen et al., *ConvStencil*, PPoPP 2024).
Emulation of a type by sums of narrower ones is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cudnn_autotune.engines.problem import DTYPES, ConvProblem

Bound = Literal["memory", "compute", "launch"]
TF32 = "tf32"
# For each type, the arithmetics that represent its operands exactly.
_EXACT_IN: Mapping[str, tuple[str, ...]] = {
    "float16": ("float16", TF32, "float32", "float64"),
    "bfloat16": ("bfloat16", TF32, "float32", "float64"),
    TF32: (TF32, "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
ARITHMETICS = tuple(_EXACT_IN)
"""``float16``, ``bfloat16``, ``tf32``, ``float32`` and ``float64``."""


@dataclass(frozen=True)
class Peaks:
    """The highest rates that were measured on a GPU.

    Raises:
        ValueError: a rate or time is not above 0, an arithmetic is unknown, or float64 is missing,
            whose units can compute every type.
    """

    bytes_per_ms: float
    """Bytes of DRAM traffic in a millisecond, reading and writing together."""
    flops_per_ms: Mapping[str, float]
    """Floating-point operations in a millisecond, by each arithmetic of ``ARITHMETICS`` that the
    GPU has. A multiplication and an addition are two."""
    launch_ms: float
    """Milliseconds from the start of an empty kernel to the next one's."""

    def __post_init__(self) -> None:
        if unknown := self.flops_per_ms.keys() - _EXACT_IN.keys():
            allowed = ", ".join(ARITHMETICS)
            raise ValueError(f"flops_per_ms: must be of {allowed}, got {sorted(unknown)}")
        if "float64" not in self.flops_per_ms:
            raise ValueError("flops_per_ms: float64 is missing")
        values = {f"flops_per_ms.{name}": rate for name, rate in self.flops_per_ms.items()}
        values |= {"bytes_per_ms": self.bytes_per_ms, "launch_ms": self.launch_ms}
        for name, value in values.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: must be above 0, got {value}")

    def rate_of(self, problem: ConvProblem) -> float:
        """Returns the operations a millisecond of the fastest unit that can compute ``problem``."""
        name = DTYPES[problem.dtype]
        if problem.may_use_tf32:
            name = TF32
        rates = self.flops_per_ms
        return max(rates[unit] for unit in _EXACT_IN[name] if unit in rates)

    def best(self, other: Peaks) -> Peaks:
        """Returns the higher rates and the shorter launch: disturbed measurements are too low."""
        rates = {
            name: max(peaks.flops_per_ms.get(name, 0.0) for peaks in (self, other))
            for name in ARITHMETICS
            if name in self.flops_per_ms or name in other.flops_per_ms
        }
        return Peaks(
            bytes_per_ms=max(self.bytes_per_ms, other.bytes_per_ms),
            flops_per_ms=rates,
            launch_ms=min(self.launch_ms, other.launch_ms),
        )


@dataclass(frozen=True)
class Limit:
    """The least time of a call, and what binds it."""

    limit_ms: float
    """The least time of a call in milliseconds."""
    bound_by: Bound
    """``"memory"``, ``"compute"`` or ``"launch"``, whichever takes longest."""

    def times(self, time_ms: float) -> float:
        """Returns ``time_ms`` over the limit."""
        return time_ms / self.limit_ms

    def gain_ms(self, time_ms: float) -> float:
        """Returns the milliseconds, 0 or more, between a call's ``time_ms`` and the limit."""
        return max(0.0, time_ms - self.limit_ms)


class Touched(NamedTuple):
    """Counts of a convolution's needed elements and products."""

    inputs: int
    """Elements of the input that some output depends on."""
    weights: int
    """Elements of the weight that meet the input, not only its padding."""
    outputs: int
    """Elements of the output that depend on some input."""
    products: int
    """Pairs of elements of input and weight that are multiplied; the same for all operations."""


def limit(problem: ConvProblem, peaks: Peaks) -> Limit:
    """Returns the limit of ``problem`` on a GPU with these peaks."""
    times: dict[Bound, float] = {
        "memory": bytes_moved(problem) / peaks.bytes_per_ms,
        "compute": operations(problem) / peaks.rate_of(problem),
        "launch": peaks.launch_ms,
    }
    bound = max(times, key=times.__getitem__)
    return Limit(times[bound], bound)


def operations(problem: ConvProblem) -> int:
    """Returns the floating-point operations that ``problem`` needs: two for each product. Unlike
    ``problem.flops`` they leave out products with the padding's zeros."""
    return 2 * touched(problem).products


def bytes_moved(problem: ConvProblem) -> int:
    """Returns the bytes that ``problem`` must read or write: each operand's touched elements, the
    whole result, and bias, residual and slopes."""
    found = touched(problem)
    elements = {
        "fprop": found.inputs + found.weights + math.prod(problem.output_shape),
        "dgrad": found.outputs + found.weights + math.prod(problem.input_shape),
        "wgrad": found.outputs + found.inputs + math.prod(problem.weight_shape),
    }[problem.op]
    elements += problem.weight_shape[0] * (problem.bias + problem.has_slope)
    if problem.residual:
        elements += math.prod(problem.output_shape)
    return elements * problem.dtype.itemsize


def touched(problem: ConvProblem) -> Touched:
    """Counts the needed parts, in time proportional to the sum of the kernel's sizes."""
    batch, channels = problem.input_shape[:2]
    filters, depth = problem.weight_shape[:2]
    inputs, outputs = batch * channels, batch * filters
    weights, products = filters * depth, batch * filters * depth
    # Each count is a product over the dimensions.
    for d in range(problem.spatial_dims):
        along = _along(problem, d)
        inputs *= along.inputs
        weights *= along.weights
        outputs *= along.outputs
        products *= along.products
    return Touched(inputs, weights, outputs, products)


def _along(problem: ConvProblem, d: int) -> Touched:
    """Returns the counts of :func:`touched` along one spatial dimension."""
    size, taps = problem.input_shape[2 + d], problem.weight_shape[2 + d]
    stride, dilation, padding = problem.stride[d], problem.dilation[d], problem.padding[d]
    last_output = problem.output_shape[2 + d] - 1
    ranges: list[tuple[int, int]] = []
    # Input positions by their remainder modulo the stride, where they are ranges too.
    read: dict[int, list[tuple[int, int]]] = {}
    for tap in range(taps):
        ahead = tap * dilation - padding  # output p meets input p * stride + ahead at this tap
        first = max(0, -(ahead // stride))
        last = min(last_output, (size - 1 - ahead) // stride)
        if first <= last:
            ranges.append((first, last))
            skipped, remainder = divmod(ahead, stride)
            read.setdefault(remainder, []).append((first + skipped, last + skipped))
    return Touched(
        inputs=sum(map(_covered, read.values())),
        weights=len(ranges),
        outputs=_covered(ranges),
        products=sum(last - first + 1 for first, last in ranges),
    )


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Counts the whole numbers in the union of closed ranges."""
    count, end = 0, -1
    for first, last in sorted(ranges):
        count += max(0, last - max(first, end + 1) + 1)
        end = max(end, last)
    return count
