"""Small arguments for the ops, for checks of derivatives and of registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cudnn_autotune  # noqa: F401  (registers the ops)
from support.conv.references import convolution

ops = torch.ops.cudnn_autotune
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format by the number of dimensions."""


@dataclass(frozen=True)
class Case:
    """A forward convolution; ``padding`` has n entries or 2 n, (pre..., post...)."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def dims(self) -> int:
        return len(self.stride)

    @property
    def geometry(self) -> tuple[list[int], list[int], list[int], int]:
        """The last arguments of each op."""
        return list(self.stride), list(self.padding), list(self.dilation), self.groups

    @property
    def both_sides(self) -> tuple[int, ...]:
        return self.padding if len(self.padding) == 2 * self.dims else self.padding * 2

    @property
    def is_symmetric(self) -> bool:
        return self.both_sides[: self.dims] == self.both_sides[self.dims :]

    @property
    def output_padding(self) -> list[int]:
        """Of the transposed convolution of the output that has the input's shape."""
        n = self.dims
        return [
            self.input_shape[2 + d]
            - (self.output_shape[2 + d] - 1) * self.stride[d]
            + self.both_sides[d]
            + self.both_sides[n + d]
            - self.dilation[d] * (self.weight_shape[2 + d] - 1)
            - 1
            for d in range(n)
        ]

    @property
    def transposed_geometry(self) -> tuple[list[int], list[int], list[int], list[int], int]:
        """The last arguments of conv_transpose; the padding must be symmetric."""
        assert self.is_symmetric
        stride, _, dilation, groups = self.geometry
        return stride, list(self.padding[: self.dims]), self.output_padding, dilation, groups

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(
            self.plain(
                torch.empty(self.input_shape, device="meta"),
                torch.empty(self.weight_shape, device="meta"),
            ).shape
        )

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same convolution by PyTorch."""
        return convolution(
            input,
            weight,
            bias,
            stride=self.stride,
            padding=self.both_sides,
            dilation=self.dilation,
            groups=self.groups,
        )

    def tensors(
        self,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
        requires_grad: bool = True,
        channels_last: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input, weight, bias, grad_output: standard normal from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        shapes = (
            self.input_shape,
            self.weight_shape,
            self.weight_shape[:1],
            self.output_shape,
        )
        tensors = []
        for shape in shapes:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensor = tensor.to(device, dtype)
            if channels_last and tensor.dim() in CHANNELS_LAST:
                tensor = tensor.to(memory_format=CHANNELS_LAST[tensor.dim()])
            tensors.append(tensor.requires_grad_(requires_grad))
        return tuple(tensors)

    def calls(
        self, device: str, dtype: torch.dtype, channels_last: bool
    ) -> list[tuple[Any, tuple[Any, ...]]]:
        """Calls of the ops, with and without what is optional."""
        input, weight, bias, grad_output = self.tensors(device, dtype, False, channels_last)
        found: list[tuple[Any, tuple[Any, ...]]] = [
            (ops.conv_fprop, (input, weight, bias, *self.geometry)),
            (ops.conv_fprop, (input, weight, None, *self.geometry, "heuristic", 0)),
            (ops.conv_dgrad, (grad_output, weight, list(self.input_shape), *self.geometry)),
            (ops.conv_wgrad, (grad_output, input, list(self.weight_shape), *self.geometry)),
        ]
        if self.is_symmetric:
            of_input = torch.randn(self.input_shape[1], device=device, dtype=dtype)
            given = (grad_output, weight)
            found += [
                (ops.conv_transpose, (*given, of_input, *self.transposed_geometry)),
                (ops.conv_transpose, (*given, None, *self.transposed_geometry, "heuristic", 0)),
            ]
        return found


CASES = {
    "plain": Case((2, 3, 4, 5), (4, 3, 3, 2), (1, 1), (0, 0), (1, 1)),
    "padding": Case((1, 2, 4, 3), (3, 2, 3, 3), (1, 1), (1, 2), (1, 1)),
    "stride": Case((2, 2, 6, 7), (3, 2, 3, 2), (2, 3), (1, 0), (1, 1)),
    "stride_leaves_a_rest": Case((1, 2, 8, 8), (2, 2, 3, 3), (3, 2), (0, 1), (1, 1)),
    "dilation": Case((1, 2, 7, 6), (3, 2, 3, 2), (1, 1), (2, 1), (2, 3)),
    "groups": Case((2, 4, 4, 3), (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), groups=2),
    "depthwise": Case((1, 3, 5, 5), (6, 1, 3, 3), (1, 1), (1, 1), (1, 1), groups=3),
    "asymmetric": Case((1, 2, 5, 5), (3, 2, 4, 2), (1, 1), (1, 0, 2, 1), (1, 1)),
    "asymmetric_all": Case((1, 2, 5, 5), (4, 1, 2, 2), (2, 1), (0, 2, 1, 1), (1, 2), groups=2),
    "one_dimension": Case((2, 3, 9), (4, 3, 3), (2,), (1,), (2,)),
    "three_dimensions": Case((1, 2, 4, 4, 3), (2, 2, 2, 3, 2), (1, 2, 1), (0, 1, 1), (1, 1, 1)),
}
