"""The description of one convolution, which is the key under which it is tuned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C, require_cuda_build
from cudnn_autotune.core.json_node import did_you_mean, shown
from cudnn_autotune.engines.activations import Activation

Operation = Literal["fprop", "dgrad", "wgrad"]
DepthwiseKernel = Literal["auto", "cudnn", "native"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
DEPTHWISE_KERNELS: tuple[DepthwiseKernel, ...] = get_args(DepthwiseKernel)
DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
"""The channels-last memory format by the number of spatial dimensions."""
_INT32_MAX = 2**31 - 1
MOST_ALIGNED = 32
"""The largest alignment in bytes: a larger one counts as this one."""

Ints = int | Iterable[int]
Operands = tuple[Tensor, ...]
"""The forward's input, weight and output; then a fused problem's bias, residual and slopes."""


@dataclass(frozen=True, init=False)
class ConvProblem:
    """A convolution in one direction, with everything that decides which engine is fastest.

    Shapes are those of the forward convolution, also for ``dgrad`` (the gradient of the input) and
    ``wgrad`` (the gradient of the weight). Tensors are dense in ``memory_format``, except slices
    (``pixel_strides``).

    Args:
        op: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        input_shape: ``(N, C, *spatial)``, with one to three spatial dimensions.
        weight_shape: ``(K, C / groups, *kernel)``.
        stride, dilation: an int, or one a spatial dimension. ``dilation`` is 1 where the kernel has
            one element.
        padding: an int, one a spatial dimension, ``"valid"``, ``"same"``, or two a spatial
            dimension: those before each dimension, then those after each.
        groups: number of groups, which divides C and K.
        dtype: ``torch.float16``, ``bfloat16``, ``float32`` or ``float64``.
        memory_format: ``torch.contiguous_format``, ``torch.channels_last`` (2-d) or
            ``torch.channels_last_3d``.
        deterministic: whether to leave out engines that may give other bits from run to run.
        allow_tf32: for float32, whether tensor cores may round the inputs to TF32.
        allow_reduced_precision: for float16 and bfloat16, whether partial sums may be kept in them.
        alignment: alignment in bytes of input, weight and output, a power of two up to 32. Memory
            that torch allocates has 32 and more.
        bias, residual, activation: operations after a forward convolution. It computes
            ``activation(conv(input, weight) + bias + residual)``, with a bias of shape ``(K,)`` and
            a residual of the output's shape, layout and dtype. ``activation`` is ``""`` or a kind
            of ``ACTIVATIONS``; leaky ReLU has its slope in the name, as in ``"leaky_relu(0.1)"``,
            and ELU its alpha, from 0.0001 to 1000. ``"prelu"`` has slopes in a tensor of shape
            ``(K,)``. All tensors are aligned to 32 bytes.
        depthwise_kernel: ``"auto"``, ``"cudnn"`` or ``"native"``: the kernel of PyTorch's own path,
            as ``torch.backends.cudnn.depthwise_kernel`` of torch 2.14 and later names it. It is
            ``"auto"`` where the setting changes nothing: without depthwise filters, and in
            channels_last.
        pixel_strides: elements from one pixel to the next, of the input and of the output, if one
            of them is a slice of channels; None if both are dense. A slice's stride is a multiple
            of 32 bytes. Slices need a forward convolution in channels_last, with all tensors
            aligned to 32 bytes.

    Raises:
        ValueError, TypeError: an argument is not allowed; the text names it, what is allowed and
            what was given. Since cuDNN counts in 32 bits, a tensor has fewer than 2**31 elements.
    """

    op: Operation
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    memory_format: torch.memory_format
    deterministic: bool
    allow_tf32: bool
    allow_reduced_precision: bool
    alignment: tuple[int, int, int]
    bias: bool
    residual: bool
    activation: str
    depthwise_kernel: DepthwiseKernel
    pixel_strides: tuple[int, int] | None

    def __init__(
        self,
        op: Operation,
        input_shape: Iterable[int],
        weight_shape: Iterable[int],
        stride: Ints = 1,
        padding: Ints | Literal["same", "valid"] = 0,
        dilation: Ints = 1,
        groups: int = 1,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        deterministic: bool = False,
        allow_tf32: bool = True,
        allow_reduced_precision: bool = True,
        alignment: tuple[int, int, int] = (32, 32, 32),
        bias: bool = False,
        residual: bool = False,
        activation: str = "",
        depthwise_kernel: DepthwiseKernel = "auto",
        pixel_strides: tuple[int, int] | None = None,
    ) -> None:
        if op not in OPERATIONS:
            meant = did_you_mean(op, OPERATIONS)
            raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {shown(op)}{meant}")
        x = _shape("input_shape", input_shape)
        n = len(x) - 2
        w = _shape("weight_shape", weight_shape)
        if len(w) != len(x):
            raise ValueError(
                f"weight_shape must have {len(x)} dimensions, as input_shape has, got {w}"
            )
        strides = _ints("stride", stride, n, least=1)
        dilations = _ints("dilation", dilation, n, least=1)
        # The dilation of one element has no effect, and must not make two keys of one problem.
        dilations = tuple(1 if k == 1 else d for d, k in zip(dilations, w[2:], strict=True))
        if not _is_int(groups) or not 1 <= groups <= _INT32_MAX:
            raise ValueError(f"groups must be an int of 1 or more, got {shown(groups)}")
        if x[1] != w[1] * groups:
            raise ValueError(
                f"input_shape must have {w[1] * groups} channels (weight_shape[1] * groups = "
                f"{w[1]} * {groups}), got {x[1]}"
            )
        if w[0] % groups:
            raise ValueError(f"groups must divide weight_shape[0] = {w[0]}, got {groups}")
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(f'torch.{d}' for d in DTYPES.values())}, "
                f"got {shown(dtype)}"
            )
        if memory_format not in (torch.contiguous_format, CHANNELS_LAST.get(n)):
            allowed = ["torch.contiguous_format"]
            if n in CHANNELS_LAST:
                allowed.append(str(CHANNELS_LAST[n]))
            raise ValueError(
                f"memory_format must be {' or '.join(allowed)} with {n} spatial dimension(s), "
                f"got {shown(memory_format)}"
            )
        if depthwise_kernel not in DEPTHWISE_KERNELS:
            raise ValueError(
                f"depthwise_kernel must be one of {', '.join(DEPTHWISE_KERNELS)}, "
                f"got {shown(depthwise_kernel)}"
            )
        aligned = tuple(alignment) if isinstance(alignment, Iterable) else ()
        if len(aligned) != 3 or any(a not in (1, 2, 4, 8, 16, 32) for a in aligned):
            raise ValueError(
                f"alignment must be three powers of two from 1 to 32 bytes, got {shown(alignment)}"
            )
        if activation != "":
            activation = Activation.named(activation).name
        if (bias or residual or activation) and aligned != (32, 32, 32):
            raise ValueError(f"alignment must be (32, 32, 32) of a fused problem, got {aligned}")
        if op != "fprop" and (bias or residual or activation):
            raise ValueError(
                f"bias, residual and activation are of op 'fprop' only, got them with {op!r}"
            )
        paddings = _padding(padding, n, strides, dilations, w[2:])
        # TF32 and reduced-precision sums exist for some dtypes only, and PyTorch has kernels for
        # some convolutions only. Elsewhere the flag has no effect, and must not make two keys of
        # one problem.
        is_half = dtype in (torch.float16, torch.bfloat16)
        is_depthwise = 1 < groups == x[1]
        follows_setting = is_depthwise and memory_format == torch.contiguous_format
        values: dict[str, Any] = {
            "op": op,
            "input_shape": x,
            "weight_shape": w,
            "stride": strides,
            "padding": paddings,
            "dilation": dilations,
            "groups": groups,
            "dtype": dtype,
            "memory_format": memory_format,
            "deterministic": bool(deterministic),
            "allow_tf32": bool(allow_tf32) or dtype != torch.float32,
            "allow_reduced_precision": bool(allow_reduced_precision) or not is_half,
            "alignment": aligned,
            "bias": bool(bias),
            "residual": bool(residual),
            "activation": activation,
            "depthwise_kernel": depthwise_kernel if follows_setting else "auto",
            "pixel_strides": None if pixel_strides == (x[1], w[0]) else pixel_strides,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if min(self.output_shape) < 1:
            raise ValueError(
                f"weight_shape: a kernel of {w[2:]} with dilation {dilations} does not fit into "
                f"an input of {x[2:]} with padding {paddings}"
            )
        if self.pixel_strides is not None:
            self._check_slices(self.pixel_strides)
        self._check_counts()

    def _check_slices(self, pixel_strides: tuple[int, int]) -> None:
        """Checks where the input and the output are slices of channels."""
        least = (self.input_shape[1], self.weight_shape[0])
        step = MOST_ALIGNED // self.dtype.itemsize
        is_right = isinstance(pixel_strides, tuple) and len(pixel_strides) == 2
        if not is_right or not all(
            _is_int(size)
            and (size == channels or (channels < size <= _INT32_MAX and size % step == 0))
            for size, channels in zip(pixel_strides, least, strict=True)
        ):
            raise ValueError(
                f"pixel_strides must be {least[0]} and {least[1]}, the channels of input and "
                f"output, or larger multiples of {step}, got {shown(pixel_strides)}"
            )
        is_last = self.memory_format != torch.contiguous_format
        if self.op != "fprop" or not is_last or self.alignment != (MOST_ALIGNED,) * 3:
            raise ValueError(
                "pixel_strides are of op 'fprop' in channels_last with an alignment of "
                f"{MOST_ALIGNED} only, got op {self.op!r}, {self.memory_format} and "
                f"{self.alignment}"
            )

    def _check_counts(self) -> None:
        """Checks what cuDNN counts in 32 bits; 9.19 divides by zero where a product overflows."""
        n = self.spatial_dims
        counts = [
            ("input_shape: the number of elements", math.prod(self.input_shape)),
            ("weight_shape: the number of elements", math.prod(self.weight_shape)),
            ("input_shape: the number of elements of the output", math.prod(self.output_shape)),
        ]
        for d in range(n):
            padded = self.input_shape[2 + d] + self.padding[d] + self.padding[n + d]
            counts.append(("padding: an input dimension with it", padded))
            counts.append(("dilation: times the stride it", self.dilation[d] * self.stride[d]))
        for what, count in counts:
            if count > _INT32_MAX:
                raise ValueError(f"{what} must be below 2**31, got {count}")

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dimensions, 1 to 3."""
        return len(self.input_shape) - 2

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The output's shape in the forward convolution, ``(N, K, *spatial)``."""
        n = self.spatial_dims
        spatial = (
            (
                self.input_shape[2 + d]
                + self.padding[d]
                + self.padding[n + d]
                - self.dilation[d] * (self.weight_shape[2 + d] - 1)
                - 1
            )
            // self.stride[d]
            + 1
            for d in range(n)
        )
        return (self.input_shape[0], self.weight_shape[0], *spatial)

    @property
    def is_fused(self) -> bool:
        """Whether the problem has a bias, a residual or an activation."""
        return self.bias or self.residual or bool(self.activation)

    @property
    def has_slope(self) -> bool:
        """Whether the activation is PReLU, whose slopes are an operand."""
        return self.activation == "prelu"

    @property
    def may_use_tf32(self) -> bool:
        """Whether the operands are float32 and may be rounded to TF32."""
        return self.dtype == torch.float32 and self.allow_tf32

    @property
    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The strides of input, weight and output."""
        x, y = self.pixel_strides or (self.input_shape[1], self.weight_shape[0])
        is_last = self.memory_format != torch.contiguous_format
        return (
            strides_of(self.input_shape, is_last, x),
            strides_of(self.weight_shape, is_last),
            strides_of(self.output_shape, is_last, y),
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of one call, where a multiplication and an addition are two:
        ``2 N K P Q (C / groups) R S``, the same for all three operations."""
        return 2.0 * math.prod(self.weight_shape[1:]) * math.prod(self.output_shape)

    @property
    def text(self) -> str:
        """The problem in one line. Different problems have different texts."""
        return str(self.native().text)

    def native(self) -> _C.ConvProblem:
        """Returns this problem as the extension's type."""
        return _native_of(self)

    @classmethod
    def from_native(cls, native: _C.ConvProblem) -> ConvProblem:
        values: dict[str, Any] = native.fields()
        values["dtype"] = DTYPES_BY_NAME[values["dtype"]]
        is_plain = values["memory_format"] == "contiguous"
        n = len(values["stride"])
        values["memory_format"] = torch.contiguous_format if is_plain else CHANNELS_LAST[n]
        return cls(**values)


@lru_cache(maxsize=256)  # a first call asks several times for the same one
def _native_of(problem: ConvProblem) -> _C.ConvProblem:
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    values["dtype"] = DTYPES[problem.dtype]
    is_plain = problem.memory_format == torch.contiguous_format
    values["memory_format"] = "contiguous" if is_plain else "channels_last"
    return require_cuda_build().ConvProblem(**values)


def as_images(problem: ConvProblem) -> ConvProblem:
    """Returns a contiguous 1-d problem as a 2-d one of images of height 1, with the same elements
    at the same addresses."""
    before, after = problem.padding
    return replace(
        problem,
        input_shape=_with_height_1(problem.input_shape),
        weight_shape=_with_height_1(problem.weight_shape),
        stride=(1, *problem.stride),
        padding=(0, before, 0, after),
        dilation=(1, *problem.dilation),
    )


def _with_height_1(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:])


def check_problem(problem: object) -> None:
    """Raises TypeError where ``problem`` is not a :class:`ConvProblem`."""
    if not isinstance(problem, ConvProblem):
        raise TypeError(f"problem must be a ConvProblem, got {shown(problem)}")


def strides_of(
    shape: Sequence[int], channels_last: bool, pixel_stride: int | None = None
) -> tuple[int, ...]:
    """Returns the strides of a dense tensor (N, C, *spatial) or weight (K, C, *kernel), contiguous
    or with the channels fastest. A 1-d tensor is an image of height 1.

    Args:
        pixel_stride: elements from a pixel to the next one of a slice of channels in channels_last;
            None: the tensor is dense.
    """
    sizes, order = list(shape), [*range(len(shape))]
    if channels_last:
        order.append(order.pop(1))
        sizes[1] = pixel_stride or sizes[1]
    strides, place = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = place
        place *= sizes[dim]
    return tuple(strides)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape(name: str, shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Iterable) else ()
    if not 3 <= len(sizes) <= 5 or not all(_is_int(s) and 1 <= s <= _INT32_MAX for s in sizes):
        raise ValueError(f"{name} must be 3 to 5 ints of 1 or more, got {shown(shape)}")
    return sizes


def _ints(name: str, value: Ints, n: int, least: int, twice: bool = False) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Iterable) else (value,) * n
    counts = (n, 2 * n) if twice else (n,)
    if len(values) not in counts or not all(
        _is_int(v) and least <= v <= _INT32_MAX for v in values
    ):
        allowed = " or ".join(map(str, counts))
        raise ValueError(f"{name} must be {allowed} int(s) of {least} or more, got {shown(value)}")
    return values


def same_padding(dilation: Iterable[int], kernel: Iterable[int]) -> tuple[int, ...]:
    """Returns the elements that ``padding="same"`` adds before each dimension, then after each.

    As in PyTorch, an odd total puts the extra element after.
    """
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return (*(t // 2 for t in totals), *(t - t // 2 for t in totals))


def split_sides(sides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Splits the elements that are added before each dimension, then after each, into what both
    sides have, and what each side has more."""
    n = len(sides) // 2
    both = [min(before, after) for before, after in zip(sides[:n], sides[n:], strict=True)]
    return both, [side - least for side, least in zip(sides, both * 2, strict=True)]


def in_pairs(sides: Sequence[int]) -> list[int]:
    """Returns the elements that are added before each dimension, then after each, in the order of
    :func:`torch.nn.functional.pad`: both sides of the last dimension come first."""
    n = len(sides) // 2
    return [size for d in reversed(range(n)) for size in sides[d::n]]


def _padding(
    padding: Ints | str,
    n: int,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    kernel: tuple[int, ...],
) -> tuple[int, ...]:
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * (2 * n)
        if padding == "same":
            if any(s != 1 for s in stride):
                raise ValueError(f"padding 'same' needs a stride of 1, got {stride}")
            return same_padding(dilation, kernel)
        raise ValueError(f"padding must be ints, 'valid' or 'same', got {shown(padding)}")
    values = _ints("padding", padding, n, least=0, twice=True)
    return values if len(values) == 2 * n else values * 2
