"""Launches of ``norm_pointwise``: how its kernel divides a convolution among blocks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cudnn_autotune.core.background import spare_threads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.kernels import sources, wgmma
from cudnn_autotune.engines.kernels.family import INT32_MAX, occupancy
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Dim3, Kernel

MOST_PLANS = 3
"""Launches of a problem that are worth a measurement."""
_MOST_THREADS = 4
"""Threads that compile kernels side by side."""
_PLANES = 8
_CHUNK = 8 * _PLANES
"""Channels of the input in a stage."""
_ROW_BYTES = 16
"""Bytes of 8 channels."""
_FACTOR_BYTES = 8 * _CHUNK
_STAGES = (3, 4)
_MOST_SUMS = 128
_OTHER_REGISTERS = 64
"""Registers of a thread for sums, and beside them."""
_WIDEST_TILE = 256
"""Output channels of a block at most."""
_MOST_SLICES = 65535
"""Blocks of a grid in its second dimension, at most."""
_BYTES_A_CLOCK = {False: 18, True: 28}
"""Bytes of inputs and outputs that a multiprocessor moves in a clock, about, while all do: from
memory, and where all of them are in the L2 cache."""
_ROW_CLOCKS = 0.6
"""Clocks of a multiprocessor to copy a row of the filters, which its L1 cache mostly has."""
_NORM_CLOCKS = 0.03
"""Clocks of a multiprocessor for the norm of a number."""
_PRODUCT_FACTOR = 1.3
"""Clocks of a product by those that its bound allows, as of other kernels on an H200."""
_SM_REGISTERS = 65536
_STEP_CLOCKS = 300
_LATENCY = 2500
"""Clocks of a block for a stage beside its products, and before its first product and behind its
last one, about."""


@dataclass(frozen=True)
class PointwiseProblem:
    """A call of ``norm_pointwise``, as far as its launches depend on it."""

    dtype: torch.dtype
    vectors: torch.dtype
    """The dtype of the norm's vectors."""
    pixels: int
    """Pixels of all images."""
    channels: int
    out_channels: int
    bias: bool
    residual: bool
    activation: str

    @property
    def chunks(self) -> int:
        return -(-self.channels // _CHUNK)


@dataclass(frozen=True)
class PointwisePlan:
    """One launch of the kernel."""

    problem: PointwiseProblem
    warpgroups: int
    m_tiles: int
    n_tile: int
    keeps_filters: bool
    """Whether all filters of a block are in shared memory."""
    stages: int

    @property
    def text(self) -> str:
        """The division in words, such as ``128x64 kept, 4 stages``."""
        kept = " kept" if self.keeps_filters else ""
        return f"{self.rows}x{self.n_tile}{kept}, {self.stages} stages"

    @property
    def rows(self) -> int:
        """Pixels of a tile."""
        return 64 * self.m_tiles * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return self.m_tiles * self.n_tile // 2 + _OTHER_REGISTERS

    @property
    def tiles(self) -> int:
        return -(-self.problem.pixels // self.rows)

    @property
    def slices(self) -> int:
        return self.problem.out_channels // self.n_tile

    @property
    def shared_bytes(self) -> int:
        chunks = self.problem.chunks
        inputs = self.stages * _PLANES * (self.rows + 1)
        filters = (chunks if self.keeps_filters else self.stages) * _PLANES * (self.n_tile + 1)
        return (inputs + filters) * _ROW_BYTES + chunks * _FACTOR_BYTES

    def resident(self, gpu: Gpu) -> int:
        """Returns the blocks that a multiprocessor holds at a time."""
        return occupancy(gpu, self.threads, self.registers, self.shared_bytes)

    def grid(self, gpu: Gpu) -> Dim3:
        most = max(1, self.resident(gpu) * gpu.multiprocessors // self.slices)
        of_one = -(-self.tiles // most)
        return (-(-self.tiles // of_one), self.slices, 1)

    def clocks(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor."""
        problem, rows, n = self.problem, self.rows, self.n_tile
        blocks, slices, _ = self.grid(gpu)
        tiles = -(-self.tiles // blocks)
        held = -(-blocks * slices // gpu.multiprocessors)
        moved = 2 * problem.pixels * (problem.channels + problem.out_channels)
        rate = _BYTES_A_CLOCK[moved <= gpu.l2_bytes]
        padded = problem.chunks * _CHUNK
        filters = n * problem.channels / 8 * _ROW_CLOCKS * (1 if self.keeps_filters else tiles)
        copying = held * (filters + tiles * 2 * rows * (problem.channels + n) / rate)
        normalising = held * tiles * rows * padded * _NORM_CLOCKS
        product = self.warpgroups * self.m_tiles * max(n / 2, 16 + n / 4) * _PRODUCT_FACTOR
        products = tiles * problem.chunks * (_PLANES // 2) * product
        bounds = (copying, normalising, held * products)
        alone = tiles * problem.chunks * _STEP_CLOCKS + products
        return _LATENCY + max(max(bounds) + sum(bounds) / 8, alone)

    def kernel(self) -> Kernel:
        problem, n = self.problem, self.n_tile
        defines: dict[str, str | int] = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "VECTOR": sources.ELEMENTS[problem.vectors],
            "WARPGROUPS": self.warpgroups,
            "M_TILES": self.m_tiles,
            "N_TILE": n,
            "MULTIPLY": f"multiply_{n}",
            "STAGES": self.stages,
            "KEEPS_FILTERS": int(self.keeps_filters),
            # By registers alone, so that layers with filters of other sizes share a kernel.
            "MIN_BLOCKS": _SM_REGISTERS // (self.threads * self.registers),
            "HAS_BIAS": int(problem.bias),
            "HAS_RESIDUAL": int(problem.residual),
            **dict(sources.activation_macros(problem.activation)),
        }
        source = sources.source() + wgmma.source(n) + sources.text("pointwise.cu", __package__)
        return Kernel(source, "norm_pointwise", tuple(defines.items()), wgmma.ARCH_SUFFIX)


def _possible(problem: PointwiseProblem, gpu: Gpu) -> Iterator[PointwisePlan]:
    widths = [n for n in range(8, _WIDEST_TILE + 8, 8) if problem.out_channels % n == 0]
    for n_tile, (warpgroups, m_tiles), keeps_filters in itertools.product(
        widths[-3:], ((1, 1), (2, 1), (2, 2)), (False, True)
    ):
        of_stages = [
            PointwisePlan(problem, warpgroups, m_tiles, n_tile, keeps_filters, stages)
            for stages in _STAGES
        ]
        plan = max(of_stages, key=lambda one: (one.resident(gpu), one.stages))
        if (
            m_tiles * n_tile // 2 <= _MOST_SUMS
            and plan.shared_bytes <= gpu.shared_bytes
            and plan.resident(gpu) > 0
            and plan.slices <= _MOST_SLICES
            and not (keeps_filters and plan.tiles <= plan.grid(gpu)[0])
        ):
            yield plan


@functools.lru_cache(maxsize=512)
def plans(problem: PointwiseProblem, gpu: Gpu) -> tuple[PointwisePlan, ...]:
    """Returns the launches that are estimated to be fastest, the best guess first; none if the
    kernel does not compute the problem."""
    if (
        gpu.compute_capability[0] != wgmma.CAPABILITY_MAJOR
        or problem.dtype not in (torch.float16, torch.bfloat16)
        or problem.vectors not in (problem.dtype, torch.float32)
        or problem.channels % 8
        or problem.out_channels % 8
        or not 0 < problem.pixels <= INT32_MAX - 512
    ):
        return ()
    found = sorted(_possible(problem, gpu), key=lambda plan: plan.clocks(gpu))
    return tuple(found[:MOST_PLANS])


def compile_plans(problems: Iterable[PointwiseProblem], device: int) -> None:
    """Compiles the kernels of all plans of problems for a GPU, side by side.

    Args:
        device: the index of the GPU.

    Raises:
        PlanError: a kernel does not compile.
    """
    gpu, capability = gpu_of(device), torch.cuda.get_device_capability(device)
    kernels = {plan.kernel() for problem in problems for plan in plans(problem, gpu)}
    with ThreadPoolExecutor(spare_threads(_MOST_THREADS)) as threads:
        list(threads.map(lambda kernel: cubin(kernel, capability), kernels))


def load(device: int, plan: int, *fields: object) -> _C.PointwiseLaunch | None:
    """Returns a launch that is loaded for a GPU; None if the kernel does not compute the problem.

    Args:
        device: the index of the GPU, which is the current device.
        plan: the place among :func:`plans`; the last one stands for those behind it.
        fields: those of :class:`PointwiseProblem`, in their order.

    Raises:
        PlanError: the kernel does not compile or load.
    """
    problem = PointwiseProblem(*fields)  # type: ignore[arg-type]
    gpu = gpu_of(device)
    found = plans(problem, gpu)
    if not found:
        return None
    chosen = found[min(plan, len(found) - 1)]
    code = cubin(chosen.kernel(), torch.cuda.get_device_capability(device))
    grid = chosen.grid(gpu)[:2]
    return _C.PointwiseLaunch(code, grid, chosen.threads, chosen.shared_bytes, chosen.tiles)
