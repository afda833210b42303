"""Patterns of NaN and infinities in the tensors that a convolution reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _all_nan(tensor: Tensor, where: torch.Generator) -> None:
    tensor.fill_(torch.nan)


def _all_infinite(tensor: Tensor, where: torch.Generator) -> None:
    tensor.fill_(torch.inf)


def _mixed(tensor: Tensor, where: torch.Generator) -> None:
    """Infinities of both signs."""
    tensor.copy_(torch.sign(tensor) * torch.inf)


def _one_a_channel(tensor: Tensor, where: torch.Generator) -> None:
    """An infinity in each channel of the first image, or of the first filter."""
    place = int(torch.randint(tensor[0, 0].numel(), (), generator=where))
    index = torch.unravel_index(torch.tensor(place), tensor.shape[2:])
    tensor[(0, slice(None), *index)] = torch.inf


def _one_nan(tensor: Tensor, where: torch.Generator) -> None:
    place = int(torch.randint(tensor.numel(), (), generator=where))
    tensor[torch.unravel_index(torch.tensor(place), tensor.shape)] = torch.nan


PATTERNS: dict[str, Callable[[Tensor, torch.Generator], None]] = {
    "all NaN": _all_nan,
    "all infinite": _all_infinite,
    "infinities of both signs": _mixed,
    "an infinity in each channel": _one_a_channel,
    "one NaN": _one_nan,
}
"""Name -> what writes the pattern into a tensor of normal numbers."""


def scatter(tensor: Tensor, seed: int) -> None:
    """Writes NaN and infinities to one to three places, most of them near the end of a line or of
    an image."""
    where = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> int:
        return int(torch.randint(count, (), generator=where))

    for _ in range(1 + drawn(3)):
        place = [drawn(size) for size in tensor.shape]
        for i in range(2, tensor.dim()):
            if drawn(3):
                place[i] = tensor.shape[i] - 1 - drawn(min(4, tensor.shape[i]))
        tensor[tuple(place)] = (torch.nan, torch.inf, -torch.inf)[drawn(3)]
