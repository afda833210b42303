"""The operator ``norm_pointwise``: a 1x1 convolution of what a norm and a ReLU make of its input.

A norm before a convolution cannot be folded into it where a ReLU is between them. This operator
reads the input once, and computes both in one kernel (``pointwise.cu``, csrc/pointwise_cuda.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.engines.weights.operators import BIAS, MEAN, SCALE, SHIFT, VARIANCE

_VECTORS = (SCALE, VARIANCE, MEAN, BIAS, SHIFT)

_library = torch.library.Library("cudnn_autotune", "FRAGMENT")
_library.define(
    "norm_pointwise(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor[] vectors, "
    "int given, float eps, str activation, int plan, str sampling, int workspace_limit) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
norm_pointwise = torch.ops.cudnn_autotune.norm_pointwise.default


def normalised(input: Tensor, vectors: Sequence[Tensor], given: int, eps: float) -> Tensor:
    """Returns ``relu((input + bias - mean) * s + shift)`` with ``s = scale / sqrt(variance + eps)``
    for each channel, computed in float32 and rounded once.

    Args:
        input: (N, C, H, W).
        vectors: (C,) each, in the order of the bits of ``engines/weights/operators.py``.
        given: the bits of the vectors that there are.
    """
    left = iter(vectors)
    own = {bit: next(left).float().reshape(-1, 1, 1) for bit in _VECTORS if given & bit}
    value = input.float()
    if BIAS in own:
        value = value + own[BIAS]
    if MEAN in own:
        value = value - own[MEAN]
    if VARIANCE in own:
        value = value / torch.sqrt(own[VARIANCE] + eps)
    if SCALE in own:
        value = value * own[SCALE]
    if SHIFT in own:
        value = value + own[SHIFT]
    return torch.relu(value.to(input.dtype))


def _check(
    input: Tensor,
    weight: Tensor,
    vectors: Sequence[Tensor],
    given: int,
) -> None:
    """Raises ValueError where operands do not fit together."""
    if input.dim() != 4 or weight.dim() != 4 or tuple(weight.shape[2:]) != (1, 1):
        raise ValueError(
            "input and weight: expected (N, C, H, W) and (K, C, 1, 1), got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[1] != input.shape[1]:
        raise ValueError(
            f"weight: expected the {input.shape[1]} channels of the input, got {weight.shape[1]}"
        )
    if not 0 <= given < 1 << len(_VECTORS) or given.bit_count() != len(vectors):
        raise ValueError(
            f"vectors: expected one for each bit of given = {given}, got {len(vectors)}"
        )
    for vector in vectors:
        if vector.dim() != 1 or vector.shape[0] != input.shape[1]:
            raise ValueError(
                f"vectors: expected shape ({input.shape[1]},), the channels of the input, got "
                f"{tuple(vector.shape)}"
            )


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    vectors: Sequence[Tensor],
    given: int,
    eps: float,
    activation: str,
    plan: int,
    sampling: str,
    workspace_limit: int,
) -> Tensor:
    """Computes ``norm_pointwise`` by PyTorch's functions and ``conv_fused``.

    Args:
        input: (N, C, H, W), in channels_last or a slice of channels of such a tensor.
        weight: (K, C, 1, 1).
        bias: (K,), or None.
        residual: of the output's shape and dtype, or None. It is added before the activation.
        vectors, given, eps: as of :func:`normalised`.
        activation: as of ``conv_fused``.
        plan: the place of the kernel's launch among those that
            :func:`~cudnn_autotune.engines.norms.pointwise_plan.plans` returns.
        sampling, workspace_limit: as of ``conv_fused``, for what the kernel does not compute.

    Returns:
        (N, K, H, W), dense in channels_last.

    Raises:
        ValueError: operands do not fit together; the message names one.
    """
    _check(input, weight, vectors, given)
    output: Tensor = torch.ops.cudnn_autotune.conv_fused(
        normalised(input, vectors, given, eps).contiguous(memory_format=torch.channels_last),
        weight,
        bias,
        residual,
        *([1, 1], [0, 0], [1, 1], 1, activation, sampling, workspace_limit),
    )
    return output.contiguous(memory_format=torch.channels_last)


_library.impl("norm_pointwise", reference, "CompositeExplicitAutograd")


@torch.library.register_fake("cudnn_autotune::norm_pointwise", lib=_library)
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    vectors: Sequence[Tensor],
    given: int,
    *others: object,
) -> Tensor:
    _check(input, weight, vectors, given)
    size = (input.shape[0], weight.shape[0], *input.shape[2:])
    return torch.empty(
        size, dtype=input.dtype, device=input.device, memory_format=torch.channels_last
    )


def load(*arguments: Any) -> Any:
    """Calls :func:`~cudnn_autotune.engines.norms.pointwise_plan.load`, which is imported at the
    first call: it needs the package's kernels."""
    from cudnn_autotune.engines.norms import pointwise_plan

    return pointwise_plan.load(*arguments)
