"""What is special to the kernels of few input channels, in the emulation of CUDA;
``test_battery.py`` has what they have in common with others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import run_recipe
from support.cuda_emulation.checks import (
    H200,
    between_bands,
    check,
    check_not_finite,
    random_tensors,
)
from support.kernels.few_channels import (
    FEW_CHANNELS,
    LARGE,
    LARGE_PLANES,
    NARROW_WGRAD,
    PLAIN,
    PLANES,
    TF32,
    WGRAD,
    WGRAD_LAYERS,
    first_layer,
)

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch, Recipe
from cudnn_autotune.kernels.sum_parts import sum_launch

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)


def launches(problem: ConvProblem) -> list[tuple[KernelLaunch, dict[str, int]]]:
    """The launch of each offer of fprop, with its macros that are numbers."""
    found = []
    for settings in FEW_CHANNELS.settings_of(problem):
        (launch,) = FEW_CHANNELS.kernel.recipe(problem, settings, H200).launches
        macros = {name: int(v) for name, v in launch.kernel.defines if str(v).isdecimal()}
        found.append((launch, macros))
    return found


def test_a_long_signal_has_wide_tiles_and_whole_vectors() -> None:
    """A tile of 128 pixels and 32 channels would leave half of the warps without pixels."""
    for launch, d in launches(first_layer("fprop", (8, 1, 1, 240_000), (32, 1, 1, 7), 1, (0, 3))):
        groups_of_a_phase = d["TILE_P"] * d["TILE_Q"] // 32
        assert groups_of_a_phase >= d["M_TILES"] * d["WARPS_M"] // 2
        assert launch.grid[0] >= H200.multiprocessors
    wide = first_layer("fprop", (8, 1, 1, 160_000), (512, 1, 1, 10), (1, 5))
    assert launches(wide)[0][1]["N_TILES"] % 4 == 0  # stores of 16 bytes


@pytest.mark.parametrize("shapes", [LARGE[0], ((8, 3, 512, 512), (64, 3, 3, 3), 1, 1)])
def test_blocks_and_warps_have_nearly_equal_shares(shapes: tuple[Any, ...]) -> None:
    """Where products bind: else a tile is chosen for its copies."""
    problem = first_layer("fprop", *shapes)
    n, k, p, q = problem.output_shape
    for launch, d in launches(problem)[:2]:
        tiles = n * -(-p // d["TILE_P"]) * -(-q // d["TILE_Q"])
        groups = d["TILE_P"] * d["TILE_Q"] // 16
        turns = -(-groups // (d["WARPS_M"] * d["M_TILES"]))
        computed = -(-tiles // launch.grid[0]) * turns * d["M_TILES"] * d["WARPS_M"] * 16
        computed *= launch.grid[0] * launch.grid[1] * d["WARPS_N"] * d["N_TILES"] * 8
        assert n * p * q * k > 0.85 * computed


def test_pairs_of_pixels_are_offered_beside_single_ones() -> None:
    for problem in LARGE_PLANES:
        found = [settings.endswith("PAIRED=1") for settings in PLANES.settings_of(problem)]
        assert any(found) == (problem.weight_shape[-1] <= 16)  # longer ones have too many weights
        assert not all(found)
        of_numbers = PLANES.settings_of(replace(problem, dtype=torch.float32))
        assert not any(settings.endswith("PAIRED=1") for settings in of_numbers)


# The gradient of the weight


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_added_into_weights_that_are_hardly_aligned(dtype: torch.dtype) -> None:
    for alignment in (4, 8, 16):
        aligned = (32, alignment, 32)
        problem = first_layer("wgrad", (1, 3, 4, 4), (8, 3, 3, 3), dtype=dtype, alignment=aligned)
        weights = torch.zeros(problem.weight_shape, dtype=dtype)
        sums = torch.randn(3, *problem.weight_shape)
        result = between_bands(weights, torch.contiguous_format, alignment)
        run_recipe(Recipe((sum_launch(problem, 3),)), {"workspace": sums, "w": result})
        assert torch.equal(result, (sums[0] + sums[1] + sums[2]).to(dtype))


@emulated
def test_the_order_of_a_sum_does_not_depend_on_that_of_the_blocks() -> None:
    problem = first_layer("wgrad", *WGRAD_LAYERS["mobilenet"])
    settings = WGRAD.settings_of(problem)[0]
    first = check(WGRAD.kernel, problem, settings)
    assert torch.equal(first, check(WGRAD.kernel, problem, settings, is_reversed=True))


def test_the_workspace_holds_the_sums_of_every_block() -> None:
    offer = WGRAD.kernel.offers(first_layer("wgrad", *LARGE[0]), H200)[0]
    assert offer.workspace_bytes == 2 * 132 * 64 * 147 * 4
    small = first_layer("wgrad", (1, 3, 224, 224), (64, 3, 7, 7), 2, 3)
    operands = 2 * (3 * 224 * 224 + 64 * 112 * 112)
    assert all(offer.workspace_bytes <= operands for offer in WGRAD.kernel.offers(small, H200))


@emulated
@pytest.mark.parametrize("options", [{}, TF32, PLAIN, {"dtype": torch.bfloat16, **PLAIN}])
@pytest.mark.parametrize(
    ("width", "kernel", "padding"), [(20, 3, 0), (20, 3, 1), (33, 4, 2), (19, 5, (0, 1, 0, 3))]
)
def test_what_is_not_finite_at_an_edge_belongs_to_some_elements_of_a_window(
    width: int, kernel: int, padding: Any, options: dict[str, Any]
) -> None:
    """There a product has zeros for the other elements, which must not meet it."""
    shapes = (1, 2, 6, width), (3, 2, 3, kernel)
    problem = first_layer("wgrad", *shapes, 1, padding, **options)
    settings = NARROW_WGRAD.settings_of(problem)[0]
    for column in (*range(4), *range(-4, 0)):
        for name, value in (("x", torch.inf), ("x", torch.nan), ("y", -torch.inf)):
            tensors = random_tensors(problem)
            tensors[name][0, 1, 2, column] = value
            check_not_finite(NARROW_WGRAD.kernel, problem, settings, tensors)


def test_narrow_layers_have_blocks_and_warps_for_all_multiprocessors() -> None:
    for problem in NARROW_WGRAD.large:
        for settings in NARROW_WGRAD.settings_of(problem):
            launch = NARROW_WGRAD.kernel.recipe(problem, settings, H200).launches[0]
            blocks_x, blocks_y, _ = launch.grid
            assert blocks_x * blocks_y * launch.block[0] >= 192 * H200.multiprocessors
            turns = -(-int(launch.arguments[-1]) // blocks_x)
            assert turns * blocks_x < 1.3 * int(launch.arguments[-1])  # nearly equal shares
