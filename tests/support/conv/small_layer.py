"""A small layer of half precision on the GPU, and what it computes."""

from __future__ import annotations

import torch
from torch import Tensor


def operands(batch: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(batch, 16, 20, 20, generator=generator)
    weight = torch.randn(24, 16, 3, 3, generator=generator)
    return input.to("cuda", torch.float16), weight.to("cuda", torch.float16)


def expected(input: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(input.cpu().double(), weight.cpu().double())
