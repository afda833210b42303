"""1x1 convolutions of a norm and a ReLU, for the operator ``norm_pointwise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fused_cases import FUNCTIONS
from torch import Tensor

from cudnn_autotune.engines.weights.operators import BIAS, MEAN, SCALE, SHIFT, VARIANCE

BATCH_NORM = SCALE | VARIANCE | MEAN | SHIFT


@dataclass(frozen=True)
class Pointwise:
    """The arguments of ``norm_pointwise``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    vectors: list[Tensor]
    given: int
    eps: float
    activation: str

    @property
    def all(self) -> tuple[Any, ...]:
        return (*vars(self).values(), 0, "", -1)

    def expected(self) -> Tensor:
        """The result in float64, of a norm that is rounded once."""
        left = iter(self.vectors)
        own = {
            1 << i: next(left).double().reshape(-1, 1, 1) for i in range(5) if self.given >> i & 1
        }
        x = self.input.double() + own.get(BIAS, 0) - own.get(MEAN, 0)
        if VARIANCE in own:
            x = x / (own[VARIANCE] + self.eps).sqrt()
        x = x * own.get(SCALE, 1) + own.get(SHIFT, 0)
        x = F.relu(x.to(self.input.dtype)).double()
        y = F.conv2d(x, self.weight.double(), None if self.bias is None else self.bias.double())
        if self.residual is not None:
            y = y + self.residual.double()
        return FUNCTIONS[self.activation](y)


def case(
    n: int,
    c: int,
    h: int,
    w: int,
    k: int,
    whole: int,
    *,
    dtype: torch.dtype = torch.float16,
    vectors: torch.dtype = torch.float16,
    given: int = BATCH_NORM,
    adds: str = "bias",
    activation: str = "relu",
    device: str = "cpu",
) -> Pointwise:
    """Returns random operands.

    Args:
        n, c, h, w, k: the sizes of (N, C, H, W) and (K, C, 1, 1).
        whole: channels of the tensor in channels_last of which the input is the last ones. The
            others are NaN.
        adds: what is added: "bias", "residual", both or neither.
    """
    generator = torch.Generator().manual_seed(c + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    room = torch.full((n, whole, h, w), float("nan"), dtype=dtype)
    room = room.to(device).contiguous(memory_format=torch.channels_last)
    input = room[:, whole - c :]
    input.copy_(random(n, c, h, w))
    last = torch.channels_last
    own = {
        SCALE: random(c),
        VARIANCE: random(c).abs() + 0.5,
        MEAN: random(c),
        BIAS: random(c),
        SHIFT: random(c),
    }
    return Pointwise(
        input,
        (random(k, c, 1, 1) * c**-0.5).to(device, dtype),
        random(k).to(device, dtype) if "bias" in adds else None,
        random(n, k, h, w).to(device, dtype, memory_format=last) if "residual" in adds else None,
        [vector.to(device, vectors) for bit, vector in own.items() if given & bit],
        given,
        1e-5,
        activation,
    )
