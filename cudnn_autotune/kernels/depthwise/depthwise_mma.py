"""Depthwise convolutions of stride 1 on tensor cores, forward and to the input."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.cost_model import busiest_clocks, ceil_div, occupancy
from cudnn_autotune.kernels.depthwise.depthwise_sizes import PlanarLayer
from cudnn_autotune.kernels.family import KernelFamily, addends, operands

_SOURCES = (
    "depthwise_mma_tile.cuh",
    "depthwise_mma_rows.cuh",
    "depthwise_mma_not_finite.cuh",
    "depthwise_mma.cu",
)
_POSITIONS = 16  # rows of an mma's first matrix
_VECTOR_BYTES = 16  # bytes of eight elements
_OUT_OCTET = 138  # vectors of the outputs of eight channels
_STAGES = 4
_LIST_BYTES = 4 * 1024 + 32  # outputs that are computed again
_MOST_STEPS = 17
_STATE_REGISTERS = 70  # per channel of a warp: the filter's matrices and incomplete sums
_OTHER_REGISTERS = 36
_CHAINED_REGISTERS = 40  # for the second channel of a warp in a chain
_MOST_ROWS = 2048  # per block, so that it counts its outputs in 32 bits
_MOST_COPIES = 8  # per thread and row
_MOST_OFFERS = 4
# Instructions of a warp in a step, and for each of its channels besides the mma.
_STEP_INSTRUCTIONS, _CHANNEL_INSTRUCTIONS = 40, 25
_STEP_LATENCY = 400  # clocks, a guess


class _Layer(PlanarLayer):
    """The sizes that a layer determines for every tiling."""

    @property
    def steps(self) -> int:
        """Vectors of eight columns that eight outputs depend on."""
        return ceil_div(self.kernel[1] + 7, 8)

    @functools.cached_property
    def column_blocks(self) -> int:
        """Blocks of eight columns in a tile: as few idle ones as possible, and little overlap."""
        if self.is_signal:
            return _POSITIONS
        blocks = ceil_div(self.out_size[1], 8)

        def cost(width: int) -> float:
            tiles = self.images * ceil_div(blocks, width)
            overlap = (width + self.steps - 1) / width
            return ceil_div(tiles, _POSITIONS // width) * (1 + 0.5 * overlap)

        return min((16, 8, 4, 2, 1), key=cost)

    @property
    def pitch(self) -> int:
        """Vectors from a tile to the next one."""
        vectors = self.column_blocks + self.steps - 1
        if self.column_blocks == 4:
            return vectors + (2 - vectors) % 4
        return vectors | 1 if self.column_blocks < 4 else vectors

    @property
    def copy_bytes(self) -> int:
        """Bytes of the largest copy that divides every row of the input."""
        size = _VECTOR_BYTES
        while not self.is_channels_last and (2 * self.in_size[1] % size or self.alignment % size):
            size //= 2
        return size

    @functools.cached_property
    def chained(self) -> int:
        """Number of warps that share the rows of a filter."""
        for chained in range(1, self.kernel[0] + 1):
            rows = ceil_div(self.kernel[0], chained)
            if rows * self.steps + 4 * (rows - 1) <= _STATE_REGISTERS:
                return chained
        return 0

    @property
    def filter_rows(self) -> int:
        """Rows of a filter in a warp."""
        return ceil_div(self.kernel[0], self.chained)

    @property
    def state_registers(self) -> int:
        return self.filter_rows * self.steps + 4 * (self.filter_rows - 1)


@dataclass(frozen=True)
class _Tiling:
    """The outputs of one block."""

    layer: _Layer
    channels: int
    warp_channels: int
    rows: int

    @property
    def settings(self) -> str:
        return f"CHANNELS={self.channels},WARP_CHANNELS={self.warp_channels},ROWS={self.rows}"

    @property
    def tiles_across(self) -> int:
        if self.layer.is_signal:
            return 1
        return ceil_div(self.layer.out_size[1], 8 * self.layer.column_blocks)

    @property
    def segments(self) -> int:
        columns = 8 * self.layer.column_blocks
        return ceil_div(self.layer.out_size[1], columns) if self.layer.is_signal else 0

    @property
    def out_rows(self) -> int:
        return self.segments or self.layer.out_size[0]

    @property
    def warps(self) -> int:
        return self.channels // self.warp_channels * self.layer.chained

    @property
    def blocks(self) -> int:
        tiles = self.layer.images * self.tiles_across * self.layer.column_blocks
        return (
            ceil_div(self.layer.channels, self.channels)
            * ceil_div(tiles, _POSITIONS)
            * ceil_div(self.out_rows, self.rows)
        )

    @functools.cached_property
    def layout(self) -> dict[str, int]:
        """The division of shared memory, by the names that depthwise_mma_tile.cuh uses."""
        s, tiles = self.layer, _POSITIONS // self.layer.column_blocks
        groups, octets = ceil_div(tiles * s.pitch, 4), ceil_div(self.channels, 8)
        plane = 4 * groups + (0 if groups % 2 else 4)
        if s.is_channels_last:
            stage, out = groups * 32 * octets * _VECTOR_BYTES, octets * _OUT_OCTET * _VECTOR_BYTES
        else:
            stage, out = self.channels * tiles * (s.pitch + 1) * _VECTOR_BYTES, 0
        partial = (s.chained - 1) * self.channels * 32 * 16
        half = self.channels * plane * _VECTOR_BYTES + out + partial
        # Shared memory of a block that has found NaN (depthwise_mma_not_finite.cuh).
        height, width = s.kernel
        again = height * octets * tiles * (s.column_blocks + s.steps - 1) * _VECTOR_BYTES
        again += ceil_div(octets * height * width, 2) * 16 + _LIST_BYTES
        return {
            "PITCH": s.pitch,
            "PLANE": plane,
            "OUT_OCTET": _OUT_OCTET,
            "STAGE_BYTES": stage,
            "OUT_BYTES": out,
            "PARTIAL_BYTES": partial,
            "SHARED_BYTES": max(_STAGES * stage + 2 * half + 16, again),
        }

    @property
    def shared_bytes(self) -> int:
        return self.layout["SHARED_BYTES"]

    def resident(self, gpu: Gpu) -> int:
        """Returns the resident blocks of a multiprocessor."""
        registers = self.layer.state_registers * self.warp_channels + _OTHER_REGISTERS
        registers += 2 * max(0, self.layer.steps - 5)  # the inputs of an mma
        if self.layer.chained > 1:
            registers += _CHAINED_REGISTERS * (self.warp_channels - 1)
        # An H100's last kilobyte of shared memory is not counted, so that its offers do not change.
        of_shared = gpu.shared_bytes // (self.shared_bytes + gpu.reserved_shared_bytes)
        threads = 32 * self.warps
        return min(occupancy(gpu, threads, min(registers, 255), self.shared_bytes), of_shared)

    def cost(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor."""
        layer = self.layer
        blocks = ceil_div(self.blocks, gpu.multiprocessors)
        # A chained warp does not multiply rows outside of its part of the filter.
        rows = self.rows + layer.filter_rows - 1
        if self.rows == self.out_rows and layer.chained == 1:
            rows -= min(max(layer.padding[0], 0), rows - self.rows)
        products = layer.filter_rows * ceil_div(layer.steps, 2)
        issue = (_STEP_INSTRUCTIONS / self.warp_channels + _CHANNEL_INSTRUCTIONS + products) / 0.8
        clocks = max(issue, 4 * layer.filter_rows * layer.steps)
        # Copies of 16 bytes are half of the L2 cache's rate.
        waste = 1.2 if layer.is_channels_last and self.channels <= 8 else 1.0
        busy = self.warps / 4 * self.warp_channels * clocks * waste
        rounds = ceil_div(blocks, self.resident(gpu))
        return (rows + 4) * busiest_clocks(blocks, busy, rounds, _STEP_LATENCY)


def _tilings(layer: _Layer, gpu: Gpu) -> Iterator[_Tiling]:
    # The filter of a chain of three and more takes many registers: four channels fill half of a
    # multiprocessor.
    for channels in (4, 8) if layer.chained > 2 else (8, 16, 32):
        for warp_channels in (1, 2):
            whole = _Tiling(layer, channels, warp_channels, 1)
            fits = 4 <= whole.warps <= 32 and whole.shared_bytes <= gpu.shared_bytes
            if not fits or not whole.resident(gpu) or whole.warps % ceil_div(channels, 8):
                continue
            if whole.layout["STAGE_BYTES"] // layer.copy_bytes > _MOST_COPIES * 32 * whole.warps:
                continue
            rows = {min(ceil_div(whole.out_rows, bands), _MOST_ROWS) for bands in (1, 2, 4, 8)}
            choices = [_Tiling(layer, channels, warp_channels, r) for r in rows]
            yield from sorted(choices, key=lambda tiling: tiling.cost(gpu))[:2]


def _is_computed(problem: ConvProblem) -> bool:
    if (
        problem.op == "wgrad"
        or problem.dtype not in (torch.float16, torch.bfloat16)
        or problem.spatial_dims > 2
        or not problem.groups == problem.input_shape[1] == problem.weight_shape[0]
        or any(s != 1 for s in (*problem.stride, *problem.dilation))
    ):
        return False
    layer = _Layer.of(problem)
    return (
        # cuDNN serves 3x3 well, and a filter with few taps wastes most of an mma.
        layer.kernel[0] * layer.kernel[1] > 9
        and layer.steps <= _MOST_STEPS
        and layer.chained > 0
        and layer.channels % 8 == 0
        and max(*layer.in_size, *layer.out_size) < 1 << 30
        and max(map(abs, layer.padding)) < 1 << 29
        and layer.alignment >= (_VECTOR_BYTES if layer.is_channels_last else 2)
    )


class DepthwiseMma(KernelFamily[_Tiling]):
    """Depthwise convolutions with a multiplier of 1, stride 1 and dilation 1, in the half types.

    It computes fprop, with every epilogue, and dgrad, in channels_last and contiguous, for filters
    of more than nine taps. The number of channels is a multiple of 8. A NaN or an infinity in an
    input reaches the outputs that depend on it, and no others. In a channel with a weight that is
    not finite, NaN may replace an infinity.
    """

    name = "depthwise_mma"
    version = sources.version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        if not _is_computed(problem):
            return ()
        tilings = sorted(_tilings(_Layer.of(problem), gpu), key=lambda tiling: tiling.cost(gpu))
        return tuple(tilings[:_MOST_OFFERS])

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        return Recipe((_launch(problem, tiling, gpu),))


def _launch(problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> KernelLaunch:
    layer = tiling.layer
    has_pairs = layer.out_size[1] % 2 == 0 and layer.alignment >= 4
    defines: tuple[tuple[str, str | int], ...] = (
        ("ELEMENT", sources.ELEMENTS[problem.dtype]),
        ("KERNEL_H", layer.kernel[0]),
        ("KERNEL_W", layer.kernel[1]),
        ("TURNED", int(problem.op == "dgrad")),
        ("SIGNAL", int(layer.is_signal)),
        ("CHANNELS_LAST", int(layer.is_channels_last)),
        ("COLUMN_BLOCKS", layer.column_blocks),
        ("CHANNELS", tiling.channels),
        ("WARP_CHANNELS", tiling.warp_channels),
        ("CHAINED", layer.chained),
        ("STAGES", _STAGES),
        ("MIN_BLOCKS", tiling.resident(gpu)),
        ("COPY_BYTES", layer.copy_bytes),
        ("SHIFT", 0 if layer.is_channels_last else -layer.padding[1] % 8),
        ("STORE_PAIRS", int(has_pairs)),
        *sources.activation_macros(problem.activation),
        ("HAS_BIAS", int(problem.bias)),
        ("HAS_RESIDUAL", int(problem.residual)),
        *tiling.layout.items(),
    )
    return KernelLaunch(
        kernel=Kernel(sources.source(__package__, *_SOURCES), "depthwise_mma", defines),
        grid=(tiling.blocks, 1, 1),
        block=(32 * tiling.warps, 1, 1),
        arguments=(
            *operands(problem),
            *addends(problem),
            layer.images,
            layer.channels,
            *layer.in_size,
            *layer.out_size,
            *layer.padding,
            tiling.tiles_across,
            tiling.rows,
        ),
        shared_bytes=tiling.shared_bytes,
    )
