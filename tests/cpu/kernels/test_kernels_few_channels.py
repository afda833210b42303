"""Forward convolutions with few input channels, on the emulation of CUDA."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.first_layers import (
    EPILOGUES,
    HEIGHT_1,
    L4,
    ODD_SHAPES,
    assert_blocks_fit,
    first_layer,
    random_first_layer,
)

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.few_channels.few_channels import FewChannels

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

KERNELS = FewChannels()


problem = partial(first_layer, "fprop")


def first_offer(of: ConvProblem) -> str:
    return KERNELS.offers(of, H200)[0].settings


FIRST_LAYERS = {
    "resnet": problem((1, 3, 40, 72), (64, 3, 7, 7), 2, 3),
    "u-net": problem((1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
    "mobilenet": problem((2, 3, 18, 48), (16, 3, 3, 3), 2, 1),
    "efficientnet": problem((1, 3, 18, 48), (24, 3, 3, 3), 2, 1),
    "convnext": problem((1, 3, 16, 80), (96, 3, 4, 4), 4),
    "diffusion": problem((1, 4, 10, 16), (320, 4, 3, 3), 1, 1),
    "grey": problem((1, 1, 12, 40), (32, 1, 5, 5), 1, 2),
    "two images": problem((1, 6, 12, 24), (64, 6, 3, 3), 1, 1),
    "inception": problem((1, 3, 15, 39), (32, 3, 3, 3), 2),
    "alexnet": problem((1, 3, 23, 40), (64, 3, 11, 11), 4, 2),
}


@pytest.mark.basic(4)
@pytest.mark.parametrize("of", FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_first_layers_of_models(of: ConvProblem) -> None:
    for is_reversed in (False, True):
        check(KERNELS, of, first_offer(of), is_reversed=is_reversed)


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", ["resnet", "u-net", "mobilenet", "diffusion"])
def test_every_offer(name: str) -> None:
    of = FIRST_LAYERS[name]
    offers = KERNELS.offers(of, H200)
    assert 2 <= len(offers) <= 5
    assert len({offer.settings for offer in offers}) == len(offers)
    for offer in offers[1:]:
        check(KERNELS, of, offer.settings, is_reversed=True)


def test_a_block_computes_many_tiles() -> None:
    """A GPU with one multiprocessor has few blocks, so buffers are used again."""
    small = replace(gpu_of("a100"), multiprocessors=1)
    of = problem((3, 3, 21, 70), (32, 3, 3, 3), 1, 1)
    settings = KERNELS.offers(of, small)[0].settings
    (launch,) = KERNELS.recipe(of, settings, small).launches
    assert launch.grid[0] < 6  # type: ignore[union-attr]
    for is_reversed in (False, True):
        check(KERNELS, of, settings, gpu=small, is_reversed=is_reversed)


@pytest.mark.basic(3)
@pytest.mark.parametrize("options", EPILOGUES, ids=str)
def test_what_a_convolution_is_fused_with(options: dict[str, Any]) -> None:
    of = problem((1, 3, 8, 20), (16, 3, 3, 3), 2, 1, **options)
    check(KERNELS, of, first_offer(of))


@pytest.mark.basic(2)
@pytest.mark.parametrize("of", [problem(*s) for s in ODD_SHAPES], ids=lambda of: of.text)
def test_odd_shapes(of: ConvProblem) -> None:
    check(KERNELS, of, first_offer(of), is_reversed=True)


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", HEIGHT_1)
def test_images_of_height_1(name: str) -> None:
    of = problem(*HEIGHT_1[name], bias=True)
    for offer in KERNELS.offers(of, H200):
        check(KERNELS, of, offer.settings)


def test_a_long_signal_has_wide_tiles_and_whole_vectors() -> None:
    """A tile of 128 pixels and 32 channels would leave half of the warps without pixels."""
    of = problem((8, 1, 1, 240_000), (32, 1, 1, 7), 1, (0, 3))
    for offer in KERNELS.offers(of, H200):
        (launch,) = KERNELS.recipe(of, offer.settings, H200).launches
        d = {name: int(v) for name, v in launch.kernel.defines if str(v).isdecimal()}
        groups_of_a_phase = d["TILE_P"] * d["TILE_Q"] // 32
        assert groups_of_a_phase >= d["M_TILES"] * d["WARPS_M"] // 2
        assert launch.grid[0] >= H200.multiprocessors
    wide = problem((8, 1, 1, 160_000), (512, 1, 1, 10), (1, 5))
    (launch,) = KERNELS.recipe(wide, first_offer(wide), H200).launches
    assert dict(launch.kernel.defines)["N_TILES"] % 4 == 0  # stores of 16 bytes


@pytest.mark.basic(2)
@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_images_that_are_less_aligned(alignment: int) -> None:
    of = problem((1, 3, 6, 16), (8, 3, 3, 3), 1, 1, alignment=(alignment, 2, 16))
    check(KERNELS, of, first_offer(of))


@pytest.mark.slow
def test_random_shapes() -> None:
    choose = random.Random(0)
    for seed in range(8):
        dtypes = [torch.float16, torch.bfloat16]
        of = random_first_layer("fprop", choose, dtypes)
        settings = choose.choice(KERNELS.offers(of, H200)).settings
        check(KERNELS, of, settings, is_reversed=bool(seed % 2), seed=seed)


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", ["resnet", "u-net", "inception", "grey", "diffusion"])
def test_infinities_and_nans_go_where_they_belong(name: str) -> None:
    of = FIRST_LAYERS[name]
    tensors = random_tensors(of)
    x = tensors["x"]
    height, width = x.shape[2:]
    places = [(0, 0), (height // 2, width // 2), (height // 3, 13), (height - 1, width - 1)]
    for i, (h, w) in enumerate(places):
        value = (torch.inf, torch.nan, -torch.inf, torch.inf)[i]
        x[0, i % x.shape[1], h, w] = value
    check_not_finite(KERNELS, of, first_offer(of), tensors)


def test_only_what_it_computes_is_offered() -> None:
    shapes = (2, 3, 16, 16), (16, 3, 3, 3)
    assert KERNELS.offers(problem(*shapes), H200)
    others = [
        problem(*shapes, dtype=torch.float32),
        problem(*shapes, memory_format=torch.contiguous_format),
        problem(*shapes, dilation=2),
        problem(*shapes, alignment=(32, 32, 8)),
        problem((2, 9, 16, 16), (16, 9, 3, 3)),
        problem((2, 3, 16, 16), (12, 3, 3, 3)),
        problem((2, 6, 16, 16), (16, 3, 3, 3), groups=2),
        problem((2, 3, 64, 64), (64, 3, 16, 16), 16),
        problem((1, 1, 1, 1), (65544, 1, 1, 1)),
        problem((1, 2, 1, 1), (8, 2, 1, 1), 2**30, (0, 2**29)),
        problem((2, 3, 16), (16, 3, 3), memory_format=torch.contiguous_format),
        ConvProblem("wgrad", *shapes, dtype=torch.float16, memory_format=torch.channels_last),
    ]
    for other in others:
        assert not KERNELS.offers(other, H200), other.text


@pytest.mark.parametrize("gpu", [H200, L4], ids=["H200", "L4"])
def test_blocks_fit_on_a_multiprocessor(gpu: Gpu) -> None:
    for shapes in (
        ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3),
        ((64, 3, 224, 224), (96, 3, 4, 4), 4),
        ((64, 3, 224, 224), (64, 3, 11, 11), 4, 2),
        ((1, 3, 224, 224), (64, 3, 7, 7), 2, 3),
    ):
        of = problem(*shapes)
        offers = KERNELS.offers(of, gpu)
        assert offers
        for offer in offers:
            assert_blocks_fit(KERNELS.recipe(of, offer.settings, gpu), offer.settings, gpu)


@pytest.mark.parametrize(
    "shapes", [((64, 3, 224, 224), (64, 3, 7, 7), 2, 3), ((8, 3, 512, 512), (64, 3, 3, 3), 1, 1)]
)
def test_blocks_and_warps_have_nearly_equal_shares(shapes: tuple[Any, ...]) -> None:
    """Where products bind: else a tile is chosen for its copies."""
    of = problem(*shapes)
    n, k, p, q = of.output_shape
    for offer in KERNELS.offers(of, H200)[:2]:
        (launch,) = KERNELS.recipe(of, offer.settings, H200).launches
        d = {name: int(v) for name, v in launch.kernel.defines if str(v).isdecimal()}
        tiles = n * -(-p // d["TILE_P"]) * -(-q // d["TILE_Q"])
        groups = d["TILE_P"] * d["TILE_Q"] // 16
        turns = -(-groups // (d["WARPS_M"] * d["M_TILES"]))
        computed = -(-tiles // launch.grid[0]) * turns * d["M_TILES"] * d["WARPS_M"] * 16
        computed *= launch.grid[0] * launch.grid[1] * d["WARPS_N"] * d["N_TILES"] * 8
        assert n * p * q * k > 0.85 * computed, offer.settings
