"""Forward convolutions of contiguous images and signals with few channels, on the emulation of
CUDA."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import (
    H200,
    assert_compiles,
    check,
    check_not_finite,
    random_tensors,
)
from support.kernels.first_layers import (
    EPILOGUES,
    HEIGHT_1,
    L4,
    assert_blocks_fit,
    first_layer,
    random_first_layer,
)

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.few_channels.few_channels_planes import FewChannelsPlanes

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

KERNELS = FewChannelsPlanes()
problem = partial(first_layer, "fprop", memory_format=torch.contiguous_format)
FIRST_LAYERS = {
    "resnet": problem((1, 3, 20, 72), (64, 3, 7, 7), 2, 3),
    "u-net": problem((1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
    "convnext": problem((1, 3, 16, 80), (96, 3, 4, 4), 4),
    "diffusion": problem((2, 4, 10, 16), (72, 4, 3, 3), 1, 1),
    "inception": problem((1, 3, 15, 39), (32, 3, 3, 3), 2),
    "wav2vec2": problem((2, 1, 2013), (64, 1, 10), 5),
    "Conv-TasNet": problem((1, 1, 4000), (48, 1, 16), 8),
    "SEANet": problem((1, 1, 1000), (32, 1, 7), 1, 3),
    "stereo": problem((2, 2, 601), (20, 2, 7), 2, 3),
    "spectrum": problem((1, 1, 6001), (34, 1, 400), 160, 200),
    "HiFi-GAN's last": problem((2, 32, 331), (1, 32, 7), 1, 3, bias=True, activation="tanh"),
    "last of images": problem((1, 12, 9, 40), (3, 12, 3, 3), 1, 1),
}


def first_offer(of: ConvProblem) -> str:
    return KERNELS.offers(of, H200)[0].settings


@pytest.mark.basic(4)
@pytest.mark.parametrize("of", FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_every_offer_of_first_layers_of_models(of: ConvProblem) -> None:
    offers = KERNELS.offers(of, H200)
    assert 2 <= len(offers) <= 4
    assert len({offer.settings for offer in offers}) == len(offers)
    for i, offer in enumerate(offers):
        check(KERNELS, of, offer.settings, is_reversed=bool(i % 2))


@pytest.mark.basic(2)
@pytest.mark.parametrize("length", range(130, 138))
def test_rows_of_the_output_begin_anywhere(length: int) -> None:
    for of in (
        problem((2, 1, length), (9, 1, 3)),
        problem((2, 2, 3, length), (16, 2, 1, 2), padding=1, residual=True, bias=True),
    ):
        check(KERNELS, of, first_offer(of), is_reversed=bool(length % 2))


DGRAD = {
    "HiFi-GAN's last": ((2, 32, 331), (1, 32, 7), 1, 3),
    "SEANet": ((1, 1, 1000), (32, 1, 7), 1, (2, 5)),
    "even": ((2, 3, 130), (24, 3, 4), 1, (0, 3)),
    "u-net": ((1, 3, 9, 72), (16, 3, 3, 3), 1, (1, 0)),
    "last of images": ((1, 12, 9, 40), (3, 12, 2, 3), 1, (1, 2, 0, 1)),
}


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", DGRAD)
def test_the_gradient_of_the_input_at_stride_1(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        of = replace(problem(*DGRAD[name], dtype=dtype), op="dgrad")
        for i, offer in enumerate(KERNELS.offers(of, H200)):
            check(KERNELS, of, offer.settings, is_reversed=bool(i % 2))


@pytest.mark.parametrize("shapes", HEIGHT_1.values(), ids=HEIGHT_1)
def test_a_contiguous_image_of_height_1(shapes: tuple[Any, ...]) -> None:
    of = problem(*shapes)
    check(KERNELS, of, first_offer(of))


def test_a_block_computes_many_tiles() -> None:
    small = replace(gpu_of("a100"), multiprocessors=1)
    for of in (problem((3, 1, 2900), (16, 1, 9), 2), problem((3, 3, 21, 70), (32, 3, 3, 3), 1, 1)):
        settings = KERNELS.offers(of, small)[0].settings
        (launch,) = KERNELS.recipe(of, settings, small).launches
        *_, tiles = launch.arguments  # type: ignore[union-attr]
        assert launch.grid[0] < tiles  # type: ignore[union-attr, operator]
        for is_reversed in (False, True):
            check(KERNELS, of, settings, gpu=small, is_reversed=is_reversed)


@pytest.mark.basic(3)
@pytest.mark.parametrize("options", EPILOGUES, ids=str)
def test_what_a_convolution_is_fused_with(options: dict[str, Any]) -> None:
    of = problem((1, 1, 143), (24, 1, 7), 2, 1, **options)
    check(KERNELS, of, first_offer(of))


@pytest.mark.basic(2)
@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_signals_that_are_less_aligned(alignment: int) -> None:
    of = problem((1, 2, 160), (8, 2, 3), 1, 1, alignment=(alignment, 2, 16))
    check(KERNELS, of, first_offer(of))


@pytest.mark.slow
def test_random_shapes() -> None:
    choose = random.Random(0)
    checked = 0
    while checked < 8:
        dtypes = [torch.float16, torch.bfloat16]
        of = random_first_layer("fprop", choose, dtypes, memory_format=torch.contiguous_format)
        if offers := KERNELS.offers(of, H200):
            check(KERNELS, of, choose.choice(offers).settings, seed=checked)
            checked += 1


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", ["resnet", "inception", "wav2vec2", "SEANet", "stereo"])
def test_infinities_and_nans_go_where_they_belong(name: str) -> None:
    of = FIRST_LAYERS[name]
    tensors = random_tensors(of)
    x = tensors["x"].flatten(2)
    for i, place in enumerate((0, x.shape[2] // 2, x.shape[2] // 3, x.shape[2] - 1)):
        x[0, i % x.shape[1], place] = (torch.inf, torch.nan, -torch.inf, torch.inf)[i]
    check_not_finite(KERNELS, of, first_offer(of), tensors)


def test_only_what_it_computes_is_offered() -> None:
    shapes = (2, 3, 160), (16, 3, 3)
    assert KERNELS.offers(problem(*shapes), H200)
    others = [
        problem(*shapes, dtype=torch.float32),
        problem((2, 3, 16, 40), (16, 3, 3, 3), memory_format=torch.channels_last),
        problem((2, 3, 4, 16, 40), (16, 3, 1, 3, 3)),
        problem(*shapes, dilation=2),
        problem(*shapes, alignment=(32, 32, 8)),
        problem((2, 9, 160), (16, 9, 3)),
        problem((2, 3, 160), (7, 3, 3)),
        problem((2, 64, 20, 20), (3, 64, 3, 3)),
        problem((2, 6, 160), (16, 3, 3), groups=2),
        problem((2, 3, 17), (16, 3, 3)),
        problem((2, 1, 9000), (16, 1, 600), 8),
        problem((1, 2, 64), (8, 2, 1), 2**24, 2**29),
        ConvProblem("wgrad", *shapes, dtype=torch.float16),
        ConvProblem("dgrad", *shapes, 2, dtype=torch.float16),
        ConvProblem("dgrad", *shapes, 1, 3, dtype=torch.float16),
    ]
    for other in others:
        assert not KERNELS.offers(other, H200), other.text


LARGE = {
    "wav2vec2": problem((8, 1, 160_000), (512, 1, 10), 5),
    "Conv-TasNet": problem((8, 1, 64_000), (256, 1, 16), 8, bias=True, activation="relu"),
    "SEANet": problem((8, 1, 240_000), (32, 1, 7), 1, 3, dtype=torch.bfloat16),
    "spectrum": problem((32, 1, 160_000), (402, 1, 400), 160, 200),
    "resnet": problem((64, 3, 224, 224), (64, 3, 7, 7), 2, 3),
    "HiFi-GAN's last": problem((8, 32, 65_536), (1, 32, 7), 1, 3, bias=True, activation="tanh"),
    "nearly 2^31 outputs": problem((8, 1, 524_200), (512, 1, 3), 1, 1),
}


@pytest.mark.parametrize("gpu", [H200, L4], ids=["H200", "L4"])
@pytest.mark.parametrize("of", LARGE.values(), ids=LARGE)
def test_blocks_fit_on_a_multiprocessor(of: ConvProblem, gpu: Gpu) -> None:
    offers = KERNELS.offers(of, gpu)
    assert offers
    for offer in offers:
        recipe = KERNELS.recipe(of, offer.settings, gpu)
        assert_blocks_fit(recipe, offer.settings, gpu)
        assert recipe.workspace_bytes == 0
    assert_compiles(KERNELS.recipe(of, offers[0].settings, gpu), gpu.compute_capability)
