"""What a convolution must give: float64, computed by PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import ADDED
from support.conv.fused_cases import FUNCTIONS

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# Norm-wise relative errors. Sums run in float32 (float64 for float64); what is left for the
# 16-bit types is the rounding of the output, and for TF32 that of the inputs to 10 bits.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
TF32_TOLERANCE = 2e-3


def tolerance(dtype: torch.dtype, allow_tf32: bool = False, activation: str = "") -> float:
    allowed = TF32_TOLERANCE if dtype is torch.float32 and allow_tf32 else TOLERANCES[dtype]
    # On a GPU, PyTorch's hard-swish multiplies by a sixth in float32, also in float64.
    return max(allowed, 1e-7) if activation == "hardswish" else allowed


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; infinite where shapes differ or a NaN shows."""
    if actual.shape != expected.shape:
        return float("inf")
    actual = actual.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    if not torch.isfinite(actual).all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale if scale > 0 else 1.0)


def assert_close(actual: Tensor, expected: Tensor, allowed: float, what: str = "") -> None:
    error = relative_error(actual, expected)
    assert error <= allowed, (
        f"{what}: relative error {error:.3g}, allowed {allowed:.3g}; "
        f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    )


def error_of(
    function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> tuple[type[BaseException], str]:
    """Returns the type and the text of the error that a call must raise."""
    with pytest.raises(Exception) as error:
        function(*arguments, **keywords)
    return error.type, str(error.value)


def pad_pairs(padding: tuple[int, ...], dims: int) -> list[int]:
    """(pre..., post...) as ``F.pad`` wants it: the last dimension first."""
    pre, post = padding[:dims], padding[dims:]
    return [side for d in reversed(range(dims)) for side in (pre[d], post[d])]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """A forward convolution by PyTorch; ``padding`` is (pre..., post...), differentiable."""
    dims = weight.dim() - 2
    return CONVOLUTIONS[dims](
        F.pad(input, pad_pairs(padding, dims)), weight, bias, stride, 0, dilation, groups
    )


def random_operands(
    problem: ca.ConvProblem, device: str | torch.device = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The operands (a, b) of ``ca.expert.execute``, standard normal, in the problem's layout."""
    shapes = {
        "fprop": (problem.input_shape, problem.weight_shape),
        "dgrad": (problem.output_shape, problem.weight_shape),
        "wgrad": (problem.output_shape, problem.input_shape),
    }[problem.op]
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        .to(device, problem.dtype)
        .contiguous(memory_format=problem.memory_format)
        for shape in shapes
    )
    return a, b


OPERANDS = {"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("y", "x")}
"""The names of the tensors that an operation reads, as ``ca.expert.execute`` takes them."""


def shapes_of(problem: ca.ConvProblem) -> dict[str, tuple[int, ...]]:
    """The shapes of x, w and y, and of the bias, residual and slopes of a problem that has them."""
    shapes = {"x": problem.input_shape, "w": problem.weight_shape, "y": problem.output_shape}
    if problem.bias:
        shapes["bias"] = (problem.weight_shape[0],)
    if problem.residual:
        shapes["residual"] = problem.output_shape
    if problem.has_slope:
        shapes["slope"] = (problem.weight_shape[0],)
    return shapes


def reference(
    problem: ca.ConvProblem, a: Tensor, b: Tensor, device: str | torch.device = "cpu"
) -> Tensor:
    """The problem's sums in float64 on ``device``, from the very values of ``a`` and ``b``."""
    a, b = (t.detach().to(device, torch.float64).contiguous() for t in (a, b))
    n = problem.spatial_dims
    padding = pad_pairs(problem.padding, n)
    geometry = (problem.stride, [0] * n, problem.dilation, False, [0] * n, problem.groups)
    if problem.op == "fprop":
        return torch.convolution(F.pad(a, padding), b, None, *geometry)
    is_dgrad = problem.op == "dgrad"
    input = F.pad(a.new_zeros(problem.input_shape) if is_dgrad else b, padding)
    weight = b if is_dgrad else a.new_zeros(problem.weight_shape)
    mask = (is_dgrad, not is_dgrad, False)
    gradients = torch.ops.aten.convolution_backward(a, input, weight, None, *geometry, mask)
    if not is_dgrad:
        return gradients[1]
    inner = zip(problem.padding[:n], problem.input_shape[2:], strict=True)
    return gradients[0][(..., *(slice(before, before + size) for before, size in inner))]


def with_epilogue(
    problem: ca.ConvProblem,
    sums: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None = None,
) -> Tensor:
    """What a fused problem makes of the convolution's sums, in float64."""
    if bias is not None:
        sums = sums + bias.double().reshape(-1, *(1,) * (sums.dim() - 2))
    if residual is not None:
        sums = sums + residual.double()
    return FUNCTIONS[problem.activation](sums) if slope is None else F.prelu(sums, slope.double())


def expected(
    problem: ca.ConvProblem, tensors: dict[str, Tensor], device: str | torch.device = "cpu"
) -> Tensor:
    """The problem's result in float64 on ``device``, where what its epilogue reads is."""
    sums = reference(problem, *(tensors[name] for name in OPERANDS[problem.op]), device)
    return with_epilogue(problem, sums, *map(tensors.get, ADDED))
