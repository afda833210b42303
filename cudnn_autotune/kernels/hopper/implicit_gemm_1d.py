"""1-d convolutions on the tensor cores of compute capability 9.0: fprop and dgrad."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.cost_model import busiest_clocks, ceil_div, occupancy
from cudnn_autotune.kernels.family import (
    INT32_MAX,
    KernelFamily,
    addends,
    operands,
    slope,
)
from cudnn_autotune.kernels.hopper import wgmma
from cudnn_autotune.kernels.hopper.implicit_gemm_1d_layer import (
    BYTES_A_CLOCK,
    MOST_BLOCKS,
    ROW_BYTES,
    BlockTile,
    Layer,
    layer_of,
    n_tiles_of,
)

_POSITIONS = 64
"""Positions of a product of matrices."""
_STAGES = 4
_STAGE_BYTES = 12 << 10
"""Least bytes of filters in a stage, unless there are fewer."""
_ZERO_BYTES = _POSITIONS * ROW_BYTES
_MOST_SUMS, _FEW_SUMS = 128, 80
"""Most registers of a thread for sums, of all registers and of half of them."""
_HALF_OF_REGISTERS = 128
"""Registers of a thread if 512 threads share a multiprocessor."""
_MOST_RESIDENT = 8
_MOST_OFFERS = 2
_ROW_CLOCKS = 0.6
"""Clocks of a multiprocessor for copying a row of the filters, mostly from its L1 cache."""
_LATENCY = 2500
"""Approximate clocks of a block before its first product and behind its last one."""


@dataclass(frozen=True)
class _Tiling(BlockTile):
    """The outputs of a block."""

    keeps_filters: bool
    """Whether a block has several tiles, and all filters in shared memory."""

    @property
    def settings(self) -> str:
        return f"{self.tile_settings},KEEPS_FILTERS={int(self.keeps_filters)}"

    @property
    def registers(self) -> int:
        # So a multiprocessor holds two blocks of 256 threads. ptxas would spill more sums, and this
        # number in four matrices.
        has_few = self.m_tiles <= 2 and self.m_tiles * self.n_tile // 2 <= _FEW_SUMS
        return min(super().registers, _HALF_OF_REGISTERS) if has_few else super().registers

    @property
    def positions(self) -> int:
        return _POSITIONS * self.m_tiles * self.warpgroups

    @property
    def tiles(self) -> int:
        return ceil_div(self.layer.units, self.positions)

    @property
    def abreast(self) -> int:
        """Blocks with other channels or phases of the same tile."""
        return self.layer.groups * self.slices * self.layer.phases

    def grid(self, gpu: Gpu) -> tuple[int, int, int]:
        layer = self.layer
        blocks = layer.images * self.tiles
        if self.keeps_filters:
            most = max(1, self.resident(gpu) * gpu.multiprocessors // self.abreast)
            blocks = ceil_div(blocks, ceil_div(blocks, most))
        return (blocks, layer.groups * self.slices, layer.phases)

    @property
    def pitch(self) -> int:
        """Rows of a plane of the input, an odd number."""
        return (self.positions + (self.layer.taps - 1) * self.layer.dilation) | 1

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the input of a tile, and later of its output."""
        scratch = 4 * self.warpgroups * 16 * (2 * self.n_tile + 16)
        return max(self.layer.planes * self.pitch * ROW_BYTES, scratch)

    @property
    def tap_bytes(self) -> int:
        """Bytes of a tap of the filters in shared memory."""
        layer, n = self.layer, self.n_tile
        rows = n // 8 * (layer.in_width + 1) if layer.is_dgrad else layer.planes * (n + 1)
        return rows * ROW_BYTES

    @property
    def stage_taps(self) -> int:
        """Taps of a stage: an even number if the last planes of two share a product."""
        taps = self.layer.taps
        if not self.keeps_filters:
            least = min(ceil_div(_STAGE_BYTES, self.tap_bytes), taps)
            taps = ceil_div(taps, taps // least)
        return taps + taps % 2 if self.layer.planes % 2 else taps

    @property
    def held_stages(self) -> int:
        """Stages in shared memory at a time."""
        return min(_STAGES, ceil_div(self.layer.taps, self.stage_taps))

    @property
    def shared_bytes(self) -> int:
        filters = self.held_stages * self.stage_taps * self.tap_bytes
        return (1 + self.keeps_filters) * self.buffer_bytes + filters + _ZERO_BYTES

    def most_resident(self, gpu: Gpu, shared_bytes: int = 0) -> int:
        """Returns the resident blocks of a multiprocessor, with these bytes of shared memory."""
        return min(occupancy(gpu, self.threads, self.registers, shared_bytes), _MOST_RESIDENT)

    def resident(self, gpu: Gpu) -> int:
        """Returns the resident blocks of a multiprocessor."""
        return self.most_resident(gpu, self.shared_bytes)

    def clocks(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor."""
        layer, n = self.layer, self.n_tile
        products = self.warpgroups * self.m_tiles * layer.taps * layer.planes / 2
        multiplying = products * self.product_clocks
        rows = layer.planes * self.pitch
        filters = layer.taps * layer.planes * n
        stored = self.positions * n * 2
        copying = (rows * ROW_BYTES + stored) / BYTES_A_CLOCK
        resident, tiles = self.resident(gpu), layer.images * self.tiles
        if self.keeps_filters:
            of_one = ceil_div(tiles, self.grid(gpu)[0])
            held = min(resident, ceil_div(self.grid(gpu)[0] * self.abreast, gpu.multiprocessors))
            busy, latency = max(multiplying, copying), multiplying + copying + _LATENCY / 2
            clocks = busiest_clocks(of_one * held, busy, of_one, latency)
            return _LATENCY + filters * _ROW_CLOCKS + clocks
        of_one = ceil_div(tiles * self.abreast, gpu.multiprocessors)
        held = min(resident, of_one)
        loading = copying + filters * _ROW_CLOCKS
        busy = max(multiplying, loading) + min(multiplying, loading) / 4
        return busiest_clocks(of_one, busy, of_one / held, _LATENCY + copying + multiplying)


def _tilings(layer: Layer, gpu: Gpu) -> Iterator[_Tiling]:
    for n_tile, (warpgroups, m_tiles), keeps_filters in itertools.product(
        n_tiles_of(layer), ((1, 1), (2, 1), (2, 2), (2, 4)), (False, True)
    ):
        tiling = _Tiling(layer, warpgroups, m_tiles, n_tile, keeps_filters)
        if (
            m_tiles * n_tile // 2 <= _MOST_SUMS
            and tiling.shared_bytes <= gpu.shared_bytes
            and tiling.resident(gpu) > 0
            and layer.images * tiling.tiles <= INT32_MAX
            and max(layer.groups * tiling.slices, layer.phases) <= MOST_BLOCKS
        ):
            yield tiling


@functools.lru_cache(maxsize=256)
def _best(layer: Layer, gpu: Gpu) -> tuple[_Tiling, ...]:
    """Returns the tilings with the least estimates."""
    found = sorted(_tilings(layer, gpu), key=lambda tiling: tiling.clocks(gpu))
    return tuple(found[:_MOST_OFFERS])


class ImplicitGemm1d(KernelFamily[_Tiling]):
    """Forward and input gradient of 1-d convolutions by implicit_gemm_1d.cu.

    It computes layers of float16 and bfloat16 in channels_last whose groups have multiples of 8
    input and output channels. It has fprop of stride 1 with every epilogue, and dgrad of any stride
    without a dilation. A NaN or an infinity in an input reaches the outputs that depend on it, and
    no others.
    """

    name = "implicit_gemm_1d"
    version = sources.version_of(__name__)
    min_capability = (wgmma.CAPABILITY_MAJOR, 0)
    takes_slope = True

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        if gpu.compute_capability[0] != wgmma.CAPABILITY_MAJOR:
            return ()
        layer = None if problem.op == "wgrad" else layer_of(problem)
        return () if layer is None else _best(layer, gpu)

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        layer = tiling.layer
        defines: dict[str, str | int] = {
            **tiling.defines(problem),
            "DGRAD": int(layer.is_dgrad),
            "STAGES": _STAGES,
            "KEEPS_FILTERS": int(tiling.keeps_filters),
            "REGISTER_BLOCKS": tiling.most_resident(gpu),  # alike for filters of any length
            **dict(sources.activation_macros(problem.activation)),
        }
        launch = KernelLaunch(
            tiling.kernel("implicit_gemm_1d", "implicit_gemm_1d.cu", defines),
            grid=tiling.grid(gpu),
            block=(tiling.threads, 1, 1),
            arguments=(
                *operands(problem),
                *addends(problem),
                slope(problem),
                *(layer.in_length, layer.groups * layer.in_width),
                *(layer.out_length, layer.groups * layer.out_width),
                *(layer.kernel, layer.padding, layer.dilation, layer.phases),
                *(tiling.tiles, layer.images * tiling.tiles, tiling.pitch, tiling.buffer_bytes),
                *(tiling.stage_taps, tiling.held_stages),
            ),
            shared_bytes=tiling.shared_bytes,
        )
        return Recipe((launch,))
