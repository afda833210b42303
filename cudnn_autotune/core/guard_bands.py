"""Memory between guard bands, which show whether a kernel writes out of its bounds, or between
unused memory, where such a write does no harm."""

from __future__ import annotations

import torch
from torch import Tensor

# More than a tile of a kernel, or a row of an image.
_BAND_BYTES = 1 << 20
_PATTERN = 0xA5
# An address modulo this number is kept, because kernels may depend on it.
_ALIGNMENT = 256


class GuardedMemory:
    """Memory of ``size`` bytes between bands that must not be written to. Its address is ``ahead``
    bytes behind a multiple of 256. Raises OutOfMemoryError."""

    def __init__(self, size: int, device: torch.device, ahead: int = 0) -> None:
        room = _ALIGNMENT + _BAND_BYTES + size + _BAND_BYTES
        whole = torch.full((room,), _PATTERN, dtype=torch.uint8, device=device)
        first = _BAND_BYTES + (ahead - whole.data_ptr() - _BAND_BYTES) % _ALIGNMENT
        self.memory = whole[first : first + size]
        self._bands: tuple[Tensor, ...] = (whole[:first], whole[first + size :])

    @classmethod
    def like(cls, tensor: Tensor) -> GuardedMemory:
        """Returns memory for a copy of a tensor, with the same alignment. The tensor is dense in
        some order, or a slice of channels in channels_last, whose other channels are guard
        bands."""
        size, item = reach_of(tensor), tensor.element_size()
        memory = cls(size * item, tensor.device, tensor.data_ptr() % _ALIGNMENT)
        if size > tensor.numel():
            channels = tensor.size(1)
            pixels = tensor.numel() // channels
            step = (size - channels) // (pixels - 1)
            between = memory.memory[channels * item :].as_strided(
                (pixels - 1, (step - channels) * item), (step * item, 1)
            )
            memory._bands = (*memory._bands, between)
        return memory

    def as_tensor(self, like: Tensor) -> Tensor:
        """Returns the memory as a tensor with another one's shape, strides and dtype."""
        return self.memory.view(like.dtype).as_strided(like.shape, like.stride())

    def is_touched(self) -> Tensor:
        """Returns whether the bands of this memory are touched (:func:`are_touched`)."""
        return are_touched(self)


def reach_of(tensor: Tensor) -> int:
    """Returns the number of elements of memory from a tensor's first to its last one."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def with_room(size: int, device: torch.device) -> Tensor:
    """Returns ``size`` bytes between two unused bands of a guard band's size, unless ``size`` is 0.
    Raises OutOfMemoryError."""
    room = _BAND_BYTES if size > 0 else 0
    return torch.empty(room + size + room, dtype=torch.uint8, device=device)[room : room + size]


def are_touched(*memories: GuardedMemory) -> Tensor:
    """Returns whether a band of one of them was written to, as a tensor of one bool on the device.
    The host does not wait for it."""
    bands = [band.flatten() for memory in memories for band in memory._bands]
    return (torch.cat(bands) != _PATTERN).any()
