"""The operator ``fold_weights``: all weights of convolutions in a layout and a dtype, with batch
norms folded into them and into the biases.

Inductor could generate that. But it compiles a kernel for a few hundred tensors for ten seconds,
and transposes small filters at a fiftieth of the memory's speed. On a GPU it is one kernel of this
package (``fold.cu``, csrc/weights/weights_cuda.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.engines.problem import strides_of

SCALE, VARIANCE, MEAN, BIAS, SHIFT = (1 << i for i in range(5))
"""The bits of the vectors that a weight may have, in the vectors' order."""
_VECTORS = (SCALE, VARIANCE, MEAN, BIAS, SHIFT)
_THREADS = 288
_GRADIENT_BYTES = 2**24

_library = torch.library.Library("cudnn_autotune", "FRAGMENT")
_library.define(
    "fold_weights(Tensor[] weights, Tensor[] vectors, int[] given, float[] eps, ScalarType dtype, "
    "bool channels_last) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
fold_weights = torch.ops.cudnn_autotune.fold_weights.default


def laid_out(weights: Sequence[Tensor], channels_last: bool, dtype: torch.dtype) -> list[Tensor]:
    """Returns copies of weights of one dtype in a layout, as of :func:`strides_of`, and a dtype. If
    gradients go back through them, each one is in its weight's strides and dtype.

    A weight that is dense in neither layout gets a contiguous gradient. Weights of one layout and
    dtype have one operator for some ``_GRADIENT_BYTES`` of their gradients, so that few of these
    are in memory twice.
    """
    of_weights = [
        (weight.stride() == strides_of(weight.shape, True), weight.dtype) for weight in weights
    ]

    def copy_back(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(gradients)
        open_parts: dict[Any, dict[int, Tensor]] = {}
        parts: list[tuple[Any, dict[int, Tensor]]] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            part = open_parts.setdefault(of_weights[i], {})
            if not part:
                parts.append((of_weights[i], part))
            part[i] = gradient
            if sum(one.numel() * one.element_size() for one in part.values()) >= _GRADIENT_BYTES:
                del open_parts[of_weights[i]]
        for of_weight, part in parts:
            copies = _laid_out([*part.values()], *of_weight)
            for i, copy in zip(part, copies, strict=True):
                found[i] = copy
        return found

    return copied(weights, lambda given: _laid_out(given, channels_last, dtype), copy_back)


def _laid_out(weights: Sequence[Tensor], channels_last: bool, dtype: torch.dtype) -> list[Tensor]:
    count = len(weights)
    found: list[Tensor] = torch.ops.cudnn_autotune.fold_weights(
        list(weights), [], [0] * count, [0.0] * count, dtype, channels_last
    )
    return found


def copied(
    tensors: Sequence[Tensor],
    copy: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    copy_back: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
) -> list[Tensor]:
    """Returns copies of tensors, through which gradients go back.

    Args:
        copy: makes the copies.
        copy_back: makes the tensors' gradients of the copies' gradients, some of which are None.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        copies: Sequence[Tensor] = _Copied.apply(copy, copy_back, *tensors)
        return list(copies)
    return list(copy(tensors))


class _Copied(torch.autograd.Function):
    """Copies of tensors, as of :func:`copied`."""

    @staticmethod
    def forward(ctx: Any, copy: Any, copy_back: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.copy_back = copy_back
        return tuple(copy(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.copy_back(gradients)


def has_bias(given: int) -> bool:
    """Returns whether a weight with these vectors has a folded bias."""
    return bool(given & (MEAN | BIAS | SHIFT))


def _empty(weight: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Returns memory for a folded weight."""
    strides = strides_of(weight.shape, channels_last)
    return weight.new_empty_strided(weight.shape, strides, dtype=dtype)


def _vectors_of(vectors: Sequence[Tensor], given: Sequence[int]) -> list[dict[int, Tensor]]:
    """Returns the vectors of each weight by their bits."""
    left = iter(vectors)
    return [{bit: next(left) for bit in _VECTORS if bits & bit} for bits in given]


def reference(
    weights: Sequence[Tensor],
    vectors: Sequence[Tensor],
    given: Sequence[int],
    eps: Sequence[float],
    dtype: torch.dtype,
    channels_last: bool,
) -> list[Tensor]:
    """Computes ``fold_weights`` by PyTorch's functions.

    Args:
        weights: (K, C, *kernel) each.
        vectors: (K,) each; a weight's vectors are adjacent, in the order of the bits.
        given: the bits of the vectors that each weight has.
        eps: of each weight, added to its variance.
        dtype: of the results. It is computed in float32, or float64 for float64, and rounded once.
        channels_last: the layout of the folded weights, as of :func:`strides_of`.

    Returns:
        ``weight * s`` for all weights, where ``s = scale / sqrt(variance + eps)``; then
        ``(bias - mean) * s + shift`` for each with a bias, a mean or a shift.
    """
    folded, biases = [], []
    of_each = _vectors_of(vectors, given)
    for weight, own, added in zip(weights, of_each, eps, strict=True):
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # A weight without vectors is copied, in any dtype.
        value = weight.to(wide) if own else weight
        scale = own[SCALE].to(wide) if SCALE in own else None
        if VARIANCE in own:
            deviation = torch.sqrt(own[VARIANCE].to(wide) + added)
            scale = deviation.reciprocal() if scale is None else scale / deviation
        if scale is not None:
            value = value * scale.reshape(-1, *[1] * (weight.dim() - 1))
        folded.append(_empty(weight, dtype, channels_last).copy_(value))
        bias = own[BIAS].to(wide) if BIAS in own else None
        if MEAN in own:
            mean = own[MEAN].to(wide)
            bias = -mean if bias is None else bias - mean
        if bias is not None and scale is not None:
            bias = bias * scale
        if SHIFT in own:
            shift = own[SHIFT].to(wide)
            bias = shift if bias is None else bias + shift
        if bias is not None:
            biases.append(bias.to(dtype, copy=True))
    return folded + biases


_library.impl("fold_weights", reference, "CompositeExplicitAutograd")


@torch.library.register_fake("cudnn_autotune::fold_weights", lib=_library)
def _(
    weights: Sequence[Tensor],
    vectors: Sequence[Tensor],
    given: Sequence[int],
    eps: Sequence[float],
    dtype: torch.dtype,
    channels_last: bool,
) -> list[Tensor]:
    folded = [_empty(weight, dtype, channels_last) for weight in weights]
    with_bias = [weight for weight, bits in zip(weights, given, strict=True) if has_bias(bits)]
    return folded + [weight.new_empty(weight.shape[0], dtype=dtype) for weight in with_bias]


def kernel_code(device: int, weight: torch.dtype, folded: torch.dtype) -> bytes:
    """Returns the kernel's machine code for a GPU.

    Args:
        device: the index of the GPU.
        weight: the dtype of the weights.
        folded: the dtype of the results.

    Raises:
        PlanError: it does not compile.
    """
    # Programs without folding need not import the kernels.
    with IMPORTING:
        from cudnn_autotune.engines.compiled_kernels import cubin
        from cudnn_autotune.engines.recipe import Kernel
        from cudnn_autotune.kernels import sources

    kernel = Kernel(
        sources.source(__package__, "fold.cu"),
        "fold_weights",
        (
            ("WEIGHT", sources.ELEMENTS[weight]),
            ("FOLDED", sources.ELEMENTS[folded]),
            ("THREADS", _THREADS),
        ),
    )
    return cubin(kernel, torch.cuda.get_device_capability(device))
