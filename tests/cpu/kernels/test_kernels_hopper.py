"""What is special to the kernels of the matrix instruction of a warpgroup, in the emulation of
CUDA; ``test_battery.py`` has what they have in common with others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support import cuda_emulation
from support.conv.references import expected, relative_error, tolerance
from support.covering import covering
from support.cuda_emulation import EmulationError, run_recipe
from support.cuda_emulation.checks import H200, check, random_tensors
from support.kernels.battery import TINY
from support.kernels.hopper import FEW_FILTERS, IMPLICIT_GEMM_1D, filters, signal

from cudnn_autotune.engines.offers import offers_of
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
KERNEL = FEW_FILTERS.kernel


@pytest.mark.basic(3)
@emulated
@covering(
    pixel_strides=[(32, 0), (0, 16), (64, 64)],
    residual=[False, True],
    size_and_count=[((7, 7), 32), ((9, 33), 32), ((3, 5, 9), 32), ((2, 4, 9), 96)],
)
def test_slices(
    pixel_strides: tuple[int, int], residual: bool, size_and_count: tuple[tuple[int, ...], int]
) -> None:
    """The input and the output are slices of the channels of larger tensors, which have
    ``pixel_strides`` more. Of 96 filters each stage has its own."""
    size, count = size_and_count
    pixel_strides = (64 + pixel_strides[0], count + pixel_strides[1])
    problem = filters(
        "fprop",
        (2, *size),
        (64, count),
        pixel_strides=pixel_strides,
        bias=True,
        residual=residual,
        activation="relu",
    )
    tensors = random_tensors(replace(problem, pixel_strides=None))
    read = torch.full((2, pixel_strides[0], *size), torch.nan, dtype=torch.float16)
    read = read.contiguous(memory_format=problem.memory_format)
    read[:, pixel_strides[0] - 64 :] = tensors["x"]
    whole = torch.full((2, pixel_strides[1], *size), 7.0, dtype=torch.float16)
    whole = whole.contiguous(memory_format=problem.memory_format)
    first = pixel_strides[1] - count
    before = whole.clone()
    for settings in FEW_FILTERS.settings_of(problem):
        whole.copy_(before)
        buffers = {**tensors, "x": read[:, pixel_strides[0] - 64 :], "y": whole[:, first:]}
        run_recipe(KERNEL.recipe(problem, settings, H200), buffers)
        assert torch.equal(whole[:, :first], before[:, :first])
        error = relative_error(whole[:, first:], expected(problem, tensors))
        assert error <= tolerance(problem.dtype, problem.allow_tf32, problem.activation)


def test_slices_are_offered() -> None:
    problem = filters("fprop", (2, 14, 14), (64, 32), pixel_strides=(96, 32))
    assert {one.id.name for one in offers_of(problem, H200)} == {"few_filters"}


FAULTS = {
    "one group of copies less": ("copies_arrived<STAGES - 2>();", "copies_arrived<STAGES - 1>();"),
    "no barrier of the block": ("    __syncthreads();\n", ""),
    "no barrier of the warpgroup": ("  sync_warpgroup();\n", ""),
    "products that nobody waits for": ("    products_done<0>();\n", ""),
    "a copy to the stage that is read": ("    multiply<0,", "copy_next_stage(); multiply<0,"),
    "a stage that is read too long": (
        "    products_done<0>();\n    if (i % kTileStages == kTileStages - 1) {",
        "    if (i % kTileStages == kTileStages - 1) {\n      products_done<0>();",
    ),
}
"""Faults that a GPU would show in some runs only, as replacements in the kernel's source."""


@pytest.mark.basic(6)
@emulated
@pytest.mark.parametrize(
    ("fault", "count_a_layer"),
    [
        (fault, count)
        for fault in FAULTS
        for count in (16, 96)  # kept in shared memory, streamed
        if count == 16 or "warpgroup" not in fault  # streamed columns are not added
    ],
)
def test_the_emulation_sees_what_is_missing(fault: str, count_a_layer: int) -> None:
    whole, broken = FAULTS[fault]
    size = (2, 9, 30) if count_a_layer == 16 else (1, 2, 5, 30)
    problem = filters("fprop", size, (96, count_a_layer))
    wrong = 0
    for settings, is_reversed in product(FEW_FILTERS.settings_of(problem, TINY), (False, True)):
        (launch,) = KERNEL.recipe(problem, settings, TINY).launches
        assert isinstance(launch, KernelLaunch)
        assert isinstance(launch.kernel, Kernel)
        assert launch.kernel.source.count(whole) == 1
        kernel = replace(launch.kernel, source=launch.kernel.source.replace(whole, broken))
        tensors = random_tensors(problem)
        try:
            recipe = Recipe((replace(launch, kernel=kernel),))
            run_recipe(recipe, tensors, is_reversed=is_reversed)
        except EmulationError:
            wrong += 1
            continue
        error = relative_error(tensors["y"], expected(problem, tensors))
        wrong += not error <= tolerance(problem.dtype, True)
    assert wrong


@emulated
def test_rows_far_above_a_wide_image() -> None:
    """Times the image's width, the first row of the window does not fit into 32 bits."""
    width, above = 11_000_000, 200
    problem = filters("fprop", (1, 1, width), (16, 8), (2, 3), (above, 1, 0, 1), (above, 1))
    (launch,) = KERNEL.recipe(problem, FEW_FILTERS.settings_of(problem)[0], H200).launches
    assert isinstance(launch, KernelLaunch)
    launch = replace(
        launch, grid=(1, 1, 1), arguments=(*launch.arguments[:-2], 1, launch.arguments[-1])
    )
    x, y = (torch.zeros(1, 1, width, n, dtype=problem.dtype).permute(0, 3, 1, 2) for n in (16, 8))
    x[..., :100] = torch.randn(100)
    w = torch.randn(8, 16, 2, 3).to(problem.dtype).contiguous(memory_format=torch.channels_last)
    run_recipe(Recipe((launch,)), {"x": x, "w": w, "y": y})
    seen = F.pad(x[..., :100], (1, 0, above, 0)).double()
    right = F.conv2d(seen, w.double(), dilation=(above, 1))
    assert relative_error(y[..., :10], right[..., :10]) <= tolerance(problem.dtype, True)


def test_kernels_of_many_products_have_fewer_warps() -> None:
    """Four warpgroups leave a thread 128 registers, which were too few for these."""
    for channels, kernel in (((80, 32), 3), ((64, 24), 5), ((64, 16), 6)):
        found = FEW_FILTERS.settings_of(filters("fprop", (64, 28, 28), channels, kernel, 1))
        assert found
        assert not any("WARPGROUPS=4" in settings for settings in found)


@pytest.mark.basic(4)
@emulated
@covering(op=["fprop", "dgrad"], width=[16, 24], is_reversed=[False, True])
def test_a_block_that_keeps_its_filters_goes_over_several_tiles(
    op: str, width: int, is_reversed: bool
) -> None:
    """One multiprocessor has few blocks; where they keep the filters, each goes over many tiles."""
    problem = signal(op, (5, 500), 1, width, 7, padding=3)
    found = IMPLICIT_GEMM_1D.settings_of(problem, TINY)
    assert any("KEEPS_FILTERS=1" in settings for settings in found)
    for settings in found:
        (launch,) = IMPLICIT_GEMM_1D.kernel.recipe(problem, settings, TINY).launches
        assert isinstance(launch, KernelLaunch)
        is_kept = "KEEPS_FILTERS=1" in settings
        all_tiles = launch.arguments[-5]
        assert isinstance(all_tiles, int)
        assert (launch.grid[0] < all_tiles) == is_kept
        check(IMPLICIT_GEMM_1D.kernel, problem, settings, gpu=TINY, is_reversed=is_reversed)
