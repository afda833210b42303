"""Weights with what is folded into them, for the operator ``fold_weights``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_autotune.compile.weights.operators import BIAS, MEAN, SCALE, SHIFT, VARIANCE
from cudnn_autotune.engines.problem import strides_of

BATCH_NORM = SCALE | VARIANCE | MEAN | SHIFT
EVERY = (0, SCALE, VARIANCE, SCALE | SHIFT, BATCH_NORM, BATCH_NORM | BIAS, VARIANCE | MEAN | BIAS)
# (K, C, *kernel): some lengths of rows are no multiples of 8, some rows or windows are long, some
# weights have one place or one channel, and there are more than one launch takes.
SHAPES = (
    (64, 3, 7, 7),
    (16, 24, 1, 1),
    (5, 7, 3),
    (33, 40, 11),
    (8, 8, 3, 3),
    (12, 1, 3, 3),
    (3, 16, 3, 2, 2),
    (2, 700, 3, 3),
    (2, 1030, 5),
    (24, 32, 3, 3),
    (300, 2, 2),
    (2, 48, 128),
    (3, 9, 600),
    (1, 72, 7, 7, 7),
    (2, 4800, 1),
    (9, 9, 1),
    *[(4, 4, 3)] * 36,
)


@dataclass(frozen=True)
class Folded:
    """The arguments of ``fold_weights``."""

    weights: list[Tensor]
    vectors: list[Tensor]
    given: list[int]
    eps: list[float]
    dtype: torch.dtype
    channels_last: bool

    @property
    def all(self) -> tuple[list[Tensor], list[Tensor], list[int], list[float], torch.dtype, bool]:
        return (
            self.weights,
            self.vectors,
            self.given,
            self.eps,
            self.dtype,
            self.channels_last,
        )

    def copies(self) -> list[tuple[int, Tensor]]:
        """The weights into which nothing is folded, in the dtype of the results, with their
        places."""
        return [
            (i, weight.to(self.dtype))
            for i, (weight, bits) in enumerate(zip(self.weights, self.given, strict=True))
            if bits == 0
        ]

    def expected(self) -> list[Tensor]:
        """The results in float64."""
        folded, biases = [], []
        left = iter(self.vectors)
        for weight, bits, eps in zip(self.weights, self.given, self.eps, strict=True):
            own = {1 << i: next(left).double() for i in range(5) if bits >> i & 1}
            zero = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
            scale = own.get(SCALE, zero + 1)
            if VARIANCE in own:
                scale = scale / (own[VARIANCE] + eps).sqrt()
            folded.append(weight.double() * scale.reshape(-1, *[1] * (weight.dim() - 1)))
            if bits & (MEAN | BIAS | SHIFT):
                centred = own.get(BIAS, zero) - own.get(MEAN, zero)
                biases.append(centred * scale + own.get(SHIFT, zero))
        return folded + biases


def case(
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    vector_dtype: torch.dtype = torch.float32,
    *,
    from_last: bool = False,
    channels_last: bool = False,
    offset: int = 0,
    device: str = "cpu",
) -> Folded:
    """Returns weights of all shapes, each with some of the vectors.

    Args:
        from_last: whether the weights lie with their channels fastest.
        channels_last: whether the results do.
        offset: how many elements are before each weight in its memory.
    """
    generator = torch.Generator().manual_seed(0)
    weights, vectors, given = [], [], []
    for i, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator)
        memory = torch.empty(offset + values.numel(), dtype=weight_dtype, device=device)
        weight = memory.as_strided(shape, strides_of(shape, from_last), offset)
        weights.append(weight.copy_(values))
        bits = EVERY[i % len(EVERY)]
        given.append(bits)
        for place in range(5):
            if bits >> place & 1:
                vector = torch.rand(shape[0], generator=generator) + 0.5
                # The bias of a convolution has the weight's dtype.
                kind = weight_dtype if 1 << place == BIAS else vector_dtype
                vectors.append(vector.to(device, kind))
    eps = [1e-3 * (i % 3) for i in range(len(weights))]
    return Folded(weights, vectors, given, eps, dtype, channels_last)
