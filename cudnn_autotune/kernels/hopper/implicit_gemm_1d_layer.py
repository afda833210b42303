"""1-d convolutions in the terms of their kernels on compute capability 9.0, and a block's tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.cost_model import ceil_div
from cudnn_autotune.kernels.family import INT32_MAX
from cudnn_autotune.kernels.hopper import wgmma

ROW_BYTES = 16
"""Bytes of 8 channels."""
MOST_BLOCKS = 65535
"""Most blocks of a grid in its second and in its third dimension."""
BYTES_A_CLOCK = 16
"""Approximate copied bytes of inputs and outputs of a multiprocessor in a clock, while all copy."""
_OTHER_REGISTERS = 64
"""Registers of a thread beside its sums."""
_WIDEST_TILE = 128
"""Most channels of a tile."""
_WIDEST = 128
"""Channels above which cuDNN's engines are fast without groups and stride."""
_PRODUCT_FACTOR = 1.3
"""Ratio of a product's clocks to its bound, as measured on an H200 in fprop."""


@dataclass(frozen=True)
class Layer:
    """A problem in the terms of the kernels: "in" is x, and "out" y; for dgrad they are y and x."""

    is_dgrad: bool
    images: int
    """Images, or rows of images."""
    groups: int
    in_length: int
    in_width: int
    """Channels of a group, here and in ``out_width``."""
    out_length: int
    out_width: int
    kernel: int
    padding: int
    dilation: int
    phases: int
    """Residues of output positions modulo the stride, for dgrad; 1 for fprop."""

    @property
    def taps(self) -> int:
        """Most taps of an output."""
        return ceil_div(self.kernel, self.phases)

    @property
    def units(self) -> int:
        """Most positions of the output in a phase."""
        return ceil_div(self.out_length, self.phases)

    @property
    def planes(self) -> int:
        return self.in_width // 8


def layer_of(problem: ConvProblem) -> Layer | None:
    """Returns the problem in the kernels' terms, or None if they do not compute it.

    In channels_last a 1-d problem has images of height 1, but any height is allowed.
    """
    c, k = problem.weight_shape[1], problem.weight_shape[0] // problem.groups
    if not (
        problem.memory_format == torch.channels_last
        and problem.weight_shape[2] == 1
        and problem.stride[0] == 1
        and problem.padding[0] == problem.padding[2] == 0
        and problem.dtype in (torch.float16, torch.bfloat16)
        and c % 8 == k % 8 == 0
        and min(problem.alignment) >= ROW_BYTES
    ):
        return None
    stride, dilation, kernel = problem.stride[1], problem.dilation[1], problem.weight_shape[3]
    padding = problem.padding[1]
    is_dgrad = problem.op == "dgrad"
    reach = padding + kernel * dilation
    if max(problem.input_shape[3], problem.output_shape[3]) + reach > INT32_MAX // 2:
        return None
    if stride > 1 and (not is_dgrad or dilation > 1):
        return None
    if problem.groups == 1 and stride == 1 and (kernel == 1 or max(c, k) > _WIDEST):
        return None  # cuDNN's engines are near the limit
    x, y = problem.input_shape, problem.output_shape
    if is_dgrad:
        x, y, c, k = y, x, k, c
    return Layer(
        *(is_dgrad, x[0] * x[2], problem.groups, x[3], c, y[3], k),
        *(kernel, padding, dilation, stride),
    )


def n_tiles_of(layer: Layer) -> list[int]:
    """Returns a block's possible numbers of channels: the two widest tiles that divide a group."""
    return [n for n in range(8, _WIDEST_TILE + 8, 8) if layer.out_width % n == 0][-2:]


@dataclass(frozen=True)
class BlockTile:
    """The matrices of 64 rows of a block's warpgroups."""

    layer: Layer
    warpgroups: int
    m_tiles: int
    """Matrices of a warpgroup."""
    n_tile: int
    """Columns of a matrix: channels of the output."""

    @property
    def tile_settings(self) -> str:
        return f"WARPGROUPS={self.warpgroups},M_TILES={self.m_tiles},N_TILE={self.n_tile}"

    @property
    def slices(self) -> int:
        """Blocks that share the output channels of a group."""
        return self.layer.out_width // self.n_tile

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers of a thread, estimated."""
        return self.m_tiles * self.n_tile // 2 + _OTHER_REGISTERS

    @property
    def product_clocks(self) -> float:
        """Clocks of a product of 64 x 16 by 16 x ``n_tile``."""
        return max(self.n_tile / 2, 16 + self.n_tile / 4) * _PRODUCT_FACTOR

    def defines(self, problem: ConvProblem) -> dict[str, str | int]:
        """Returns the macros of both kernels."""
        return {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "WARPGROUPS": self.warpgroups,
            "M_TILES": self.m_tiles,
            "N_TILE": self.n_tile,
            "PLANES": self.layer.planes,
            "MULTIPLY": f"multiply_{self.n_tile}",
        }

    def kernel(
        self,
        function: str,
        file_name: str,
        defines: Mapping[str, str | int],
        *,
        has_registers: bool = False,
    ) -> Kernel:
        """Returns the function of a source of this folder, behind its included sources."""
        own = ("implicit_gemm_1d_planes.cuh", file_name)
        instructions = wgmma.source(self.n_tile, has_registers=has_registers)
        texts = (instructions, *(sources.text(__package__, name) for name in own))
        return Kernel("".join(texts), function, tuple(defines.items()), wgmma.ARCH_SUFFIX)
