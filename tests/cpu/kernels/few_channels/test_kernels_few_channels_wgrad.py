"""Gradients of the weight with few input channels, on the emulation of CUDA."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import WORK, run_recipe
from support.cuda_emulation.checks import (
    H200,
    between_bands,
    check,
    check_not_finite,
    random_tensors,
)
from support.kernels.first_layers import (
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
from cudnn_autotune.engines.recipe import Recipe
from cudnn_autotune.kernels.few_channels.few_channels_wgrad import FewChannelsWgrad
from cudnn_autotune.kernels.sum_parts import sum_launch

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

KERNELS = FewChannelsWgrad()
ONE = replace(gpu_of("a100"), multiprocessors=1)
"""With few blocks, each of which computes many tiles."""


TF32: dict[str, Any] = {"dtype": torch.float32, "allow_tf32": True}
problem = partial(first_layer, "wgrad")


FIRST_LAYERS = {
    "resnet": problem((2, 3, 24, 48), (64, 3, 7, 7), 2, 3),
    "u-net": problem((1, 3, 9, 40), (64, 3, 3, 3), 1, 1, dtype=torch.bfloat16),
    "mobilenet": problem((2, 3, 18, 48), (16, 3, 3, 3), 2, 1),
    "efficientnet": problem((1, 3, 18, 40), (24, 3, 3, 3), 2, 1),  # 20 columns, 9 rows
    "convnext": problem((1, 3, 16, 80), (96, 3, 4, 4), 4, dtype=torch.bfloat16),
    "diffusion": problem((1, 4, 10, 16), (320, 4, 3, 3), 1, 1),
    "grey": problem((1, 1, 12, 40), (32, 1, 5, 5), 1, 2),
    "two images": problem((1, 6, 12, 24), (40, 6, 3, 3), 1, 1),
    "inception": problem((1, 3, 15, 39), (32, 3, 3, 3), 2),
    "alexnet": problem((1, 3, 23, 40), (64, 3, 11, 11), 4, 2),
    "resnet in TF32": problem((2, 3, 24, 48), (64, 3, 7, 7), 2, 3, **TF32),
    "efficientnet in TF32": problem((1, 3, 18, 40), (24, 3, 3, 3), 2, 1, **TF32),
    "convnext in TF32": problem((1, 3, 16, 80), (96, 3, 4, 4), 4, **TF32),
    "diffusion in TF32": problem((1, 4, 10, 16), (320, 4, 3, 3), 1, 1, **TF32),
    "inception in TF32": problem((1, 3, 15, 39), (32, 3, 3, 3), 2, **TF32),
}


@pytest.mark.basic(4)
@pytest.mark.parametrize("of", FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_first_layers_of_models(of: ConvProblem) -> None:
    settings = KERNELS.offers(of, H200)[0].settings
    WORK.matrices = WORK.conflicts = 0
    for is_reversed in (False, True):
        check(KERNELS, of, settings, is_reversed=is_reversed)
    assert WORK.matrices > 0
    assert WORK.conflicts == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_added_into_weights_that_are_hardly_aligned(dtype: torch.dtype) -> None:
    for alignment in (4, 8, 16):
        of = problem((1, 3, 4, 4), (8, 3, 3, 3), dtype=dtype, alignment=(32, alignment, 32))
        weights = torch.zeros(of.weight_shape, dtype=dtype)
        sums = torch.randn(3, *of.weight_shape)
        result = between_bands(weights, torch.contiguous_format, alignment)
        run_recipe(Recipe((sum_launch(of, 3),)), {"workspace": sums, "w": result})
        assert torch.equal(result, (sums[0] + sums[1] + sums[2]).to(dtype))


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", ["resnet", "mobilenet", "diffusion", "resnet in TF32"])
def test_every_offer(name: str) -> None:
    of = FIRST_LAYERS[name]
    offers = KERNELS.offers(of, H200)
    assert 2 <= len(offers) <= 5
    assert len({offer.settings for offer in offers}) == len(offers)
    for offer in offers[1:]:
        check(KERNELS, of, offer.settings, is_reversed=True)


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", ["resnet", "efficientnet", "resnet in TF32"])
def test_a_block_computes_many_tiles(name: str) -> None:
    of = FIRST_LAYERS[name]
    offer = KERNELS.offers(of, ONE)[0]
    launch, _ = KERNELS.recipe(of, offer.settings, ONE).launches
    assert launch.grid[0] <= 3  # type: ignore[union-attr]
    for is_reversed in (False, True):
        check(KERNELS, of, offer.settings, gpu=ONE, is_reversed=is_reversed)


@pytest.mark.basic(2)
@pytest.mark.parametrize("of", [problem(*s) for s in ODD_SHAPES], ids=lambda of: of.text)
def test_odd_shapes(of: ConvProblem) -> None:
    check(KERNELS, of, KERNELS.offers(of, H200)[0].settings, is_reversed=True)


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", HEIGHT_1)
def test_images_of_height_1(name: str) -> None:
    for dtype, gpu in ((torch.bfloat16, H200), (torch.float16, ONE), (torch.float32, H200)):
        of = problem(*HEIGHT_1[name], dtype=dtype)
        for offer in KERNELS.offers(of, gpu)[:2]:
            check(KERNELS, of, offer.settings, gpu=gpu, is_reversed=gpu == ONE)


@pytest.mark.basic(2)
@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_images_that_are_less_aligned(alignment: int) -> None:
    of = problem((1, 3, 6, 16), (8, 3, 3, 3), 1, 1, alignment=(alignment, 2, 16))
    check(KERNELS, of, KERNELS.offers(of, H200)[0].settings)
    if alignment >= 4:
        in_tf32 = replace(of, **TF32, alignment=(alignment, 4, 16))
        check(KERNELS, in_tf32, KERNELS.offers(in_tf32, H200)[0].settings)


@pytest.mark.slow
def test_random_shapes() -> None:
    choose = random.Random(0)
    for seed in range(12):
        dtypes = [torch.float16, torch.bfloat16, torch.float32]
        of = random_first_layer("wgrad", choose, dtypes, allow_tf32=True)
        gpu = choose.choice([H200, ONE])
        settings = choose.choice(KERNELS.offers(of, gpu)).settings
        check(KERNELS, of, settings, gpu=gpu, is_reversed=bool(seed % 2), seed=seed)


@pytest.mark.basic(3)
@pytest.mark.parametrize(
    "name", ["resnet", "efficientnet", "inception", "inception in TF32", "wav2vec2", "stereo"]
)
@pytest.mark.parametrize("operand", ["x", "y"])
def test_infinities_and_nans_go_where_they_belong(name: str, operand: str) -> None:
    """Pixels of a tile that lie outside of the output have windows in the image."""
    of = problem(*HEIGHT_1[name]) if name in HEIGHT_1 else FIRST_LAYERS[name]
    tensors = random_tensors(of)
    values = tensors[operand]
    height, width = values.shape[2:]
    for h in (0, height - 1):
        values[0, 0, h, width - 1] = torch.inf
    values[0, -1, height // 2, 1] = torch.nan
    check_not_finite(KERNELS, of, KERNELS.offers(of, H200)[0].settings, tensors)


def test_the_order_of_a_sum_does_not_depend_on_that_of_the_blocks() -> None:
    of = FIRST_LAYERS["mobilenet"]
    settings = KERNELS.offers(of, H200)[0].settings
    first = check(KERNELS, of, settings)
    assert torch.equal(first, check(KERNELS, of, settings, is_reversed=True))


def test_the_workspace_holds_the_sums_of_every_block() -> None:
    of = problem((64, 3, 224, 224), (64, 3, 7, 7), 2, 3)
    offer = KERNELS.offers(of, H200)[0]
    recipe = KERNELS.recipe(of, offer.settings, H200)
    assert recipe.workspace_bytes == offer.workspace_bytes == 2 * 132 * 64 * 147 * 4
    small = problem((1, 3, 224, 224), (64, 3, 7, 7), 2, 3)
    operands = 2 * (3 * 224 * 224 + 64 * 112 * 112)
    assert all(offer.workspace_bytes <= operands for offer in KERNELS.offers(small, H200))


def test_only_what_it_computes_is_offered() -> None:
    shapes = (2, 3, 16, 16), (16, 3, 3, 3)
    assert KERNELS.offers(problem(*shapes), H200)
    others = [
        problem(*shapes, dtype=torch.float32, allow_tf32=False),
        problem(*shapes, memory_format=torch.contiguous_format),
        problem(*shapes, alignment=(32, 32, 8)),
        problem((2, 3, 64, 64), (64, 3, 16, 16), 16),
        ConvProblem("fprop", *shapes, dtype=torch.float16, memory_format=torch.channels_last),
    ]
    for other in others:
        assert not KERNELS.offers(other, H200), other.text


@pytest.mark.parametrize("gpu", [H200, L4], ids=["H200", "L4"])
def test_blocks_fit_on_a_multiprocessor(gpu: Gpu) -> None:
    for shapes, options in product(
        (
            ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3),
            ((64, 3, 224, 224), (96, 3, 4, 4), 4),
            ((64, 3, 224, 224), (64, 3, 11, 11), 4, 2),
            ((8, 4, 64, 64), (320, 4, 3, 3), 1, 1),
        ),
        ({}, TF32),
    ):
        of = problem(*shapes, **options)
        offers = KERNELS.offers(of, gpu)
        assert offers
        for offer in offers:
            assert_blocks_fit(KERNELS.recipe(of, offer.settings, gpu), offer.settings, gpu)
