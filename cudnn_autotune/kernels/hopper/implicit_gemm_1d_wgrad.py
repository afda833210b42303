"""The weight's gradient of 1-d convolutions on the tensor cores of compute capability 9.0."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.cost_model import ceil_div, occupancy
from cudnn_autotune.kernels.family import KernelFamily
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
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_TILE = 64
"""Positions of a stage."""
_STAGES = 4
_MOST_SUMS = 144
"""Registers of a thread for sums."""
_MOST_RUNS = 64
_MOST_OFFERS = 3
_LATENCY = 3000
"""Approximate clocks of a block before its first product and behind its last one."""


@dataclass(frozen=True)
class _Tiling(BlockTile):
    """The sums of a block."""

    runs: int
    """Blocks that share the positions."""

    @property
    def settings(self) -> str:
        return f"{self.tile_settings},RUNS={self.runs}"

    @property
    def by_planes(self) -> bool:
        """Whether the rows of a matrix are channels of 8 planes, and not of 8 taps."""
        return self.layer.planes % 8 == 0

    @property
    def of_taps(self) -> int:
        """Matrices of the same taps."""
        return self.layer.planes // 8 if self.by_planes else self.layer.planes

    @property
    def blocks(self) -> int:
        """Blocks that share the matrices of a group."""
        rows = self.layer.kernel if self.by_planes else ceil_div(self.layer.kernel, 8)
        return ceil_div(rows * self.of_taps, self.m_tiles * self.warpgroups)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.blocks, self.layer.groups * self.slices, self.runs)

    @property
    def pitch(self) -> int:
        """Rows of a plane of x, an odd number, which any block's taps reach."""
        matrices, taps = self.m_tiles * self.warpgroups, 1 if self.by_planes else 8
        rows = ceil_div(matrices - 1, self.of_taps) + 1
        return (_TILE + (rows * taps - 1) * self.layer.dilation) | 1

    @property
    def stage_bytes(self) -> int:
        rows = self.layer.planes * self.pitch + self.n_tile // 8 * (_TILE + 1)
        return rows * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        return _STAGES * self.stage_bytes + ROW_BYTES  # a row of zeros

    def resident(self, gpu: Gpu) -> int:
        """Returns the resident blocks of a multiprocessor."""
        return occupancy(gpu, self.threads, self.registers, self.shared_bytes)

    def clocks(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor, and of adding the runs' sums."""
        layer = self.layer
        steps = self.warpgroups * self.m_tiles * _TILE // 16
        multiplying = steps * self.product_clocks
        copying = self.stage_bytes / BYTES_A_CLOCK
        stages = ceil_div(_tiles(layer), self.runs)
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        of_one = ceil_div(blocks, gpu.multiprocessors)
        held = min(self.resident(gpu), of_one)
        busy = max(multiplying, copying) + min(multiplying, copying) / 4
        weights = layer.groups * layer.out_width * layer.kernel * layer.in_width
        added = weights * (8 * self.runs + 2) / (BYTES_A_CLOCK * gpu.multiprocessors)
        return of_one * (stages * busy + _LATENCY / held) + added


def _tiles(layer: Layer) -> int:
    return layer.images * ceil_div(layer.out_length, _TILE)


def _tilings(layer: Layer, gpu: Gpu) -> Iterator[_Tiling]:
    shapes = itertools.product(n_tiles_of(layer), (1, 2), (1, 2, 3, 4, 6))
    for n_tile, warpgroups, m_tiles in shapes:
        one = _Tiling(layer, warpgroups, m_tiles, n_tile, 1)
        if m_tiles * n_tile // 2 > _MOST_SUMS or one.shared_bytes > gpu.shared_bytes:
            continue
        resident = one.resident(gpu)
        if resident == 0 or one.grid[1] > MOST_BLOCKS:
            continue
        slots = resident * gpu.multiprocessors
        most = min(_tiles(layer), _MOST_RUNS, max(1, slots // (one.grid[0] * one.grid[1])))
        for runs in {1, ceil_div(most, 2), most}:
            yield _Tiling(layer, warpgroups, m_tiles, n_tile, runs)


@functools.lru_cache(maxsize=256)
def _best(layer: Layer, gpu: Gpu) -> tuple[_Tiling, ...]:
    """Returns the tilings with the least estimates, which divide sums in different ways."""
    found: dict[tuple[int, ...], _Tiling] = {}
    for one in sorted(_tilings(layer, gpu), key=lambda tiling: tiling.clocks(gpu)):
        found.setdefault((one.warpgroups * one.m_tiles, one.n_tile), one)
    return tuple(found.values())[:_MOST_OFFERS]


class ImplicitGemm1dWgrad(KernelFamily[_Tiling]):
    """The weight's gradient of 1-d convolutions by implicit_gemm_1d_wgrad.cu and sum_parts.cu.

    It computes layers of stride 1 with groups, of the kinds that ``implicit_gemm_1d`` computes. A
    gradient is NaN or infinite only if one of its products is. x counts as zero outside of its
    signal, which a dy that is not finite makes NaN.
    """

    name = "implicit_gemm_1d_wgrad"
    version = sources.version_of(__name__)
    min_capability = (wgmma.CAPABILITY_MAJOR, 0)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        if gpu.compute_capability[0] != wgmma.CAPABILITY_MAJOR or problem.op != "wgrad":
            return ()
        layer = layer_of(problem) if problem.groups > 1 else None  # else cuDNN's engines are faster
        return () if layer is None else _best(layer, gpu)

    def workspace_bytes(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> int:
        return sums_bytes(problem, tiling.runs)

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        layer = tiling.layer
        defines: dict[str, str | int] = {
            **tiling.defines(problem),
            "SLICES": tiling.slices,
            "MULTIPLY_REGISTERS": f"multiply_registers_{tiling.n_tile}",
            "BY_PLANES": int(tiling.by_planes),
            "PITCH": tiling.pitch,
            "STAGES": _STAGES,
            "SHARED_BYTES": tiling.shared_bytes,
            "MIN_BLOCKS": tiling.resident(gpu),
        }
        launch = KernelLaunch(
            tiling.kernel(
                *("implicit_gemm_1d_wgrad", "implicit_gemm_1d_wgrad.cu", defines),
                has_registers=True,
            ),
            grid=tiling.grid,
            block=(tiling.threads, 1, 1),
            arguments=(
                *(Address("x"), Address("y"), Address("workspace")),
                *(layer.images, layer.in_length, layer.groups * layer.in_width),
                *(layer.out_length, layer.groups * layer.out_width),
                *(layer.kernel, layer.padding, layer.dilation),
            ),
            shared_bytes=tiling.shared_bytes,
        )
        sums = sum_launch(problem, tiling.runs)
        return Recipe((launch, sums), sums_bytes(problem, tiling.runs))
