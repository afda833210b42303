"""Rewrites lead to the same result, by an engine of cuDNN for another problem."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import run_recipe
from support.cuda_emulation.checks import (
    assert_compiles,
    between_bands,
    check,
    expected,
    random_tensors,
    written,
)
from support.kernels.random_problems import KINDS, random_problem
from torch import Tensor

from cudnn_autotune.engines.candidate_id import of_implementation, parse
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, EngineLaunch, KernelLaunch, Recipe
from cudnn_autotune.kernels.rewrites import rewrite as rewrites
from cudnn_autotune.kernels.rewrites.division import divisor
from cudnn_autotune.kernels.rewrites.filter_depths import FilterDepths
from cudnn_autotune.kernels.rewrites.packing import Copy, Packing, pack, unpack
from cudnn_autotune.kernels.rewrites.pad_channels import PadChannels
from cudnn_autotune.kernels.rewrites.patches import Patches
from cudnn_autotune.kernels.rewrites.rewrite import MOST_OFFERS, Rewrite
from cudnn_autotune.kernels.rewrites.sliced_pointwise import SlicedPointwise
from cudnn_autotune.kernels.rewrites.space_to_depth import SpaceToDepth

pytestmark = [
    pytest.mark.search,
    pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT),
]

REWRITES = (PadChannels(), SpaceToDepth(), SlicedPointwise(), Patches(), FilterDepths())
PAD, DEPTH, SLICED, PATCHES, FILTERS = REWRITES
H200 = gpu_of("h200")
OPERATIONS = ("fprop", "dgrad", "wgrad")
HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def last(op: str, x: tuple[int, ...], w: tuple[int, ...], *args: object, **more: object):
    """A problem in channels_last, in float16 unless another dtype is given."""
    form = torch.channels_last if len(x) == 4 else torch.channels_last_3d
    return ConvProblem(op, x, w, *args, **{"dtype": HALF, "memory_format": form, **more})  # type: ignore[arg-type]


def plain(op: str, x: tuple[int, ...], w: tuple[int, ...], *args: object, **more: object):
    """A problem in contiguous_format, in float16 unless another dtype is given."""
    return ConvProblem(op, x, w, *args, **{"dtype": HALF, **more})  # type: ignore[arg-type]


def check_first(rewrite: Rewrite, problem: ConvProblem, *, is_reversed: bool = False) -> None:
    offers = rewrite.offers(problem, H200)
    assert offers, f"{rewrite.name} does not offer {problem.text}"
    check(rewrite, problem, offers[0].settings, gpu=H200, is_reversed=is_reversed)


# The results


@pytest.mark.basic(4)
@pytest.mark.parametrize(
    ("op", "c", "k", "dtype"),
    [
        ("fprop", 30, 16, HALF),
        ("fprop", 24, 30, BFLOAT16),
        ("fprop", 17, 3, HALF),
        ("dgrad", 1, 8, HALF),
        ("dgrad", 6, 30, BFLOAT16),
        ("dgrad", 16, 3, HALF),
        ("wgrad", 12, 16, HALF),
        ("wgrad", 16, 21, BFLOAT16),
        ("wgrad", 30, 3, HALF),
    ],
)
def test_channels_are_padded(op: str, c: int, k: int, dtype: torch.dtype) -> None:
    check_first(PAD, last(op, (2, c, 6, 7), (k, c, 3, 2), 1, 1, dtype=dtype))


def test_channels_of_three_dimensions_are_padded() -> None:
    for op in OPERATIONS:
        check_first(PAD, last(op, (1, 18, 3, 4, 5), (10, 18, 2, 3, 3), (1, 2, 2), 1))


DEPTH_SHAPES = {
    "7x7": ((2, 3, 14, 18), (8, 3, 7, 7), 2, 3),
    "odd image": ((1, 3, 13, 9), (16, 3, 7, 7), 2, 3),
    "one channel": ((2, 1, 8, 11), (8, 1, 5, 5), 2, 2),
    "four channels": ((1, 4, 9, 10), (8, 4, 4, 4), 2, 1),
    "five channels": ((1, 5, 9, 10), (8, 5, 4, 3), 2, 1),
    "patches": ((2, 3, 8, 12), (8, 3, 4, 4), 4, 0),
    "overlapping patches": ((1, 3, 17, 12), (8, 3, 7, 7), 4, 3),
    "other strides": ((1, 3, 11, 14), (8, 3, 5, 4), (1, 2), (2, 0)),
    "stride of three": ((1, 2, 12, 14), (8, 2, 3, 5), 3, 1),
    "other padding": ((1, 3, 8, 9), (8, 3, 4, 4), 2, (0, 1, 1, 2)),
    "much padding": ((1, 3, 2, 3), (8, 3, 3, 4), 2, (2, 3)),
    "image smaller than the kernel": ((1, 3, 2, 1), (8, 3, 7, 7), 2, 3),
    "depth": ((1, 3, 4, 6, 7), (8, 3, 3, 4, 4), (1, 2, 2), 1),
    "strided depth": ((2, 2, 5, 6, 7), (8, 2, 3, 4, 4), 2, (1, 1, 1, 0, 0, 1)),
}


@pytest.mark.basic(8)
@pytest.mark.parametrize("op", ["fprop", "wgrad"])
@pytest.mark.parametrize("name", DEPTH_SHAPES)
def test_a_stride_becomes_channels(op: str, name: str) -> None:
    check_first(DEPTH, last(op, *DEPTH_SHAPES[name], dtype=FLOAT))


PATCH_SHAPES = {
    "2-d": ((2, 3, 32, 49), (16, 3, 16, 16)),
    "odd patches": ((2, 3, 28, 43), (8, 3, 14, 14)),
    "tall patches": ((1, 5, 41, 6), (8, 5, 37, 3)),
    "one channel": ((2, 1, 70, 24), (8, 1, 23, 24)),
    "one patch of a larger image": ((3, 3, 20, 15), (8, 3, 14, 14)),
    "tubelets": ((2, 3, 5, 8, 9), (8, 3, 2, 4, 4)),
    "flat tubelets": ((1, 2, 3, 6, 7), (8, 2, 1, 3, 2)),
    "tubelets of one channel": ((2, 1, 4, 6, 4), (8, 1, 2, 3, 2)),
}
WINDOWS = {
    "1-d": ((6, 40, 5), (16, 40, 5)),
    "2-d": ((9, 16, 3, 2), (16, 16, 3, 2)),
    "2-d, padded": ((5, 3, 7, 3), (8, 3, 7, 3)),
    "3-d": ((7, 4, 2, 3, 2), (8, 4, 2, 3, 2)),
    "3-d, padded": ((7, 3, 2, 3, 3), (8, 3, 2, 3, 3)),
    "one image": ((1, 8, 4, 4), (24, 8, 4, 4)),
}
LAYOUTS = {"channels_last": last, "contiguous": plain}


@pytest.mark.basic(12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["fprop", "wgrad"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT])
@pytest.mark.parametrize("name", PATCH_SHAPES)
def test_patches_are_gathered(name: str, dtype: torch.dtype, op: str, layout: str) -> None:
    x, w = PATCH_SHAPES[name]
    check_first(PATCHES, LAYOUTS[layout](op, x, w, w[2:], dtype=dtype))


def test_patches_of_one_dimension_are_gathered() -> None:
    for op in ("fprop", "wgrad"):
        check_first(PATCHES, plain(op, (2, 3, 550), (8, 3, 171), 171))


@pytest.mark.basic(12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_kernel_as_large_as_the_input_is_a_matrix(
    name: str, dtype: torch.dtype, op: str, layout: str
) -> None:
    x, w = WINDOWS[name]
    if len(x) == 3 and layout == "channels_last":
        return  # one dimension is contiguous
    check_first(PATCHES, LAYOUTS[layout](op, x, w, 3, dtype=dtype))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_as_large_as_the_input_is_used_where_it_lies(op: str, layout: str) -> None:
    """The kernel is as large as the input, as in the patch embedding of Qwen2-VL."""
    shapes = ((1024, 3, 2, 14, 14), (1280, 3, 2, 14, 14))
    problem = LAYOUTS[layout](op, *shapes, (2, 14, 14), dtype=BFLOAT16)
    for offer in PATCHES.offers(problem, H200):
        (launch,) = PATCHES.recipe(problem, offer.settings, H200).launches
        assert isinstance(launch, EngineLaunch)
        assert launch.problem.input_shape == (1, 1176, 1, 1024)
        assert [a.buffer for a in (launch.x, launch.w, launch.y)] == ["x", "w", "y"]


EMBEDDINGS = {
    "Qwen2-VL": ((16384, 3, 2, 14, 14), (1280, 3, 2, 14, 14)),
    "ViT-B/16": ((64, 3, 224, 224), (768, 3, 16, 16)),
    "CLIP ViT-L/14": ((64, 3, 224, 224), (1024, 3, 14, 14)),
    "VideoMAE": ((8, 3, 16, 224, 224), (768, 3, 2, 16, 16)),
}


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["fprop", "wgrad"])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_of_patches_are_offered_tensor_cores(
    name: str, op: str, layout: str, gpu: str
) -> None:
    x, w = EMBEDDINGS[name]
    for dtype in (HALF, BFLOAT16, FLOAT):
        problem = LAYOUTS[layout](op, x, w, w[2:], dtype=dtype)
        offers = PATCHES.offers(problem, gpu_of(gpu))
        assert 1 <= len(offers) <= MOST_OFFERS
        assert all("TENSOR_CORE" in offer.numerical_notes for offer in offers)


@pytest.mark.basic(5)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("x", "stride", "padding"),
    [
        ((1, 1024, 4, 4), 2, 0),
        ((2, 1025, 5, 3), (3, 2), 0),
        ((1, 1028, 3, 6), (1, 2), (1, 2, 0, 3)),
        ((1, 1024, 2, 2), 4, 6),
        ((1, 1030, 3, 3, 2), (1, 2, 2), (1, 0, 1)),
    ],
)
def test_pixels_of_a_pointwise_are_gathered(
    op: str, x: tuple[int, ...], stride: object, padding: object
) -> None:
    check_first(SLICED, last(op, x, (8, x[1], *(1,) * (len(x) - 2)), stride, padding))


FEW_DEPTHS = {
    "an image, causal": ((2, 16, 1, 7, 9), (8, 16, 3, 3, 3), 1, (2, 1, 1, 0, 1, 1)),
    "an image, even padding": ((2, 8, 1, 7, 9), (16, 8, 3, 3, 3), 1, 1),
    "an image, 3 x 1 x 1": ((1, 8, 1, 5, 6), (8, 8, 3, 1, 1), 1, (2, 0, 0, 0, 0, 0)),
    "an image, strides": ((1, 8, 1, 9, 8), (8, 8, 3, 3, 3), 2, (1, 0, 0, 1, 1, 1)),
    "an image, dilation": ((1, 8, 1, 9, 8), (8, 8, 3, 2, 2), 1, (2, 0, 0), (2, 1, 1)),
    "an image, groups": ((1, 16, 1, 6, 5), (16, 8, 5, 3, 3), 1, (4, 1, 1, 0, 1, 1), 1, 2),
    "an odd number of weights": ((1, 3, 1, 6, 5), (8, 3, 3, 3, 3), 1, (2, 1, 1, 0, 1, 1)),
    "two outputs of one depth": ((1, 8, 1, 6, 5), (8, 8, 5, 3, 3), 1, (3, 1, 1, 2, 1, 1)),
    "two depths": ((1, 8, 2, 6, 5), (8, 8, 7, 3, 3), 1, (3, 1, 1)),
    "two depths, causal": ((1, 8, 2, 6, 5), (8, 8, 5, 3, 3), 1, (4, 1, 1, 0, 1, 1)),
}


@pytest.mark.basic(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", FEW_DEPTHS)
def test_depths_of_filters_that_meet_padding_are_left_out(name: str, op: str, layout: str) -> None:
    problem = LAYOUTS[layout](op, *FEW_DEPTHS[name], dtype=(HALF, BFLOAT16)[len(name) % 2])
    check_first(FILTERS, problem)
    form = FILTERS.form(problem, H200)
    assert form is not None
    assert form.inner.spatial_dims == (2 if "image" in name or "weights" in name else 3)
    left = math.prod(form.inner.weight_shape) / math.prod(problem.weight_shape)
    depths = {"two depths": 3, "two depths, causal": 2, "two outputs of one depth": 2}.get(name, 1)
    assert left == depths / problem.weight_shape[2]


def test_the_depths_between_the_first_and_the_last_that_meet_the_input_are_left() -> None:
    """Unless the others meet the input between two outputs, too: padding is not negative."""
    sizes = itertools.product((1, 2, 3), (2, 5), (1, 2, 3), (1, 2), (0, 1, 4, 7), (0, 3, 6))
    for size, depths, stride, dilation, before, behind in sizes:
        if (room := size + before + behind - dilation * (depths - 1) - 1) < 0:
            continue
        places = [range(n, n + room + 1, stride) for n in range(0, depths * dilation, dilation)]
        met = [i for i, of in enumerate(places) if set(of) & set(range(before, before + size))]
        x, w, padding = (1, 8, size, 4, 4), (8, 8, depths, 1, 1), (before, 0, 0, behind, 0, 0)
        problem = last("fprop", x, w, (stride, 1, 1), padding, (dilation, 1, 1))
        form = FILTERS.form(problem, H200)
        first, end = (met[0], met[-1] + 1) if met else (0, depths)
        if min(before - first * dilation, behind - (depths - end) * dilation) < 0:
            first, end = 0, depths
        left = depths if form is None else math.prod(form.inner.weight_shape[2:])
        assert left == end - first


def test_filters_whose_depths_all_meet_the_input_stay() -> None:
    for x, w, *rest in (
        ((1, 8, 3, 6, 5), (8, 8, 3, 3, 3), 1, 1),
        ((1, 8, 3, 6, 5), (8, 8, 3, 3, 3), 1, (2, 1, 1, 0, 1, 1)),
        ((1, 8, 1, 6, 5), (8, 8, 1, 3, 3), 1, (0, 1, 1)),
    ):
        for op in ("fprop", "dgrad"):
            assert not FILTERS.offers(last(op, x, w, *rest), H200)
    image = FEW_DEPTHS["an image, causal"]
    assert not FILTERS.offers(last("wgrad", *image), H200), "its other depths would be zeros"


@pytest.mark.parametrize("activation", ["", "relu"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_engine_has_the_epilogue(activation: str, residual: bool) -> None:
    fused = {"bias": True, "residual": residual, "activation": activation}
    check_first(PAD, last("fprop", (2, 18, 9, 8), (16, 18, 3, 3), 2, 1, **fused))
    check_first(DEPTH, last("fprop", (2, 3, 9, 8), (16, 3, 4, 4), 2, 1, dtype=FLOAT, **fused))
    check_first(SLICED, last("fprop", (1, 1024, 4, 5), (8, 1024, 1, 1), 2, **fused))
    for layout in (last, plain):
        check_first(PATCHES, layout("fprop", (9, 8, 3, 2), (16, 8, 3, 2), 1, **fused))
    check_first(PATCHES, last("fprop", (2, 3, 28, 43), (8, 3, 14, 14), 14, **fused))
    check_first(PATCHES, last("fprop", (2, 3, 4, 9, 8), (8, 3, 2, 4, 4), (2, 4, 4), **fused))
    check_first(FILTERS, last("fprop", *FEW_DEPTHS["an image, causal"], **fused))
    contiguous = plain("fprop", (2, 3, 28, 43), (8, 3, 14, 14), 14, **fused)
    deep = plain("fprop", (2, 3, 4, 9, 8), (8, 3, 2, 4, 4), (2, 4, 4), **fused)
    few = last("fprop", (1, 24, 4, 5), (3, 24, 3, 3), 1, 1, **fused)
    if residual:
        assert not PAD.offers(few, H200), "the residual would have to be padded"
        for one in (contiguous, deep):
            assert not PATCHES.offers(one, H200), "the residual would have to be transposed"
    else:
        check_first(PATCHES, contiguous)
        check_first(PATCHES, deep)
        check_first(PAD, few)


def test_the_order_of_threads_does_not_matter() -> None:
    """The images fill more than one block, and the last one not wholly."""
    for op in OPERATIONS:
        check_first(PAD, last(op, (2, 18, 41, 37), (10, 18, 1, 2)), is_reversed=True)
    for op in ("fprop", "wgrad"):
        problem = last(op, (2, 3, 61, 47), (8, 3, 4, 4), 2, 1, dtype=FLOAT)
        check_first(DEPTH, problem, is_reversed=True)
        for layout in (last, plain):
            patches = layout(op, (2, 3, 210, 126), (8, 3, 14, 14), 14)
            check_first(PATCHES, patches, is_reversed=True)
    for op in ("fprop", "dgrad"):
        problem = last(op, (2, 1024, 9, 7), (8, 1024, 1, 1), 2)
        check_first(SLICED, problem, is_reversed=True)


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.name)
def test_random_problems(rewrite: Rewrite) -> None:
    rng = random.Random(0)
    checked = 0
    while checked < 15:
        problem = random_problem(rng, rng.choice(list(KINDS)))
        shapes = (problem.input_shape, problem.output_shape, problem.weight_shape)
        if sum(math.prod(shape) for shape in shapes) < 200_000 and rewrite.offers(problem, H200):
            check_first(rewrite, problem)
            checked += 1


# The launches


def kernels(recipe: Recipe) -> list[dict[str, str | int]]:
    found = []
    for launch in recipe.launches:
        if isinstance(launch, KernelLaunch):
            found.append(dict(launch.kernel.defines))
    return found


def test_a_direction_takes_one_launch_before_the_engine_and_one_behind_it() -> None:
    problem = last("wgrad", (2, 18, 6, 7), (10, 18, 3, 3), 1, 1)
    recipe = PAD.recipe(problem, PAD.offers(problem, H200)[0].settings, H200)
    before, engine, behind = recipe.launches
    assert isinstance(before, KernelLaunch)
    assert isinstance(engine, EngineLaunch)
    assert isinstance(behind, KernelLaunch)
    assert [k["TENSORS"] for k in kernels(recipe)] == [2, 1]
    assert {a.buffer for a in (engine.x, engine.w, engine.y)} == {"workspace"}
    assert engine.problem.weight_shape == (16, 24, 3, 3)


@pytest.mark.basic(2)
@pytest.mark.parametrize("compute_capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("rewrite", "problem"),
    [
        (PAD, last("wgrad", (2, 18, 6, 7), (10, 18, 3, 3))),
        (PAD, last("fprop", (2, 18, 6, 7), (10, 18, 3, 3), bias=True)),
        (SLICED, last("dgrad", (2, 512, 6, 7), (8, 512, 1, 1), 2)),
        (DEPTH, last("wgrad", (2, 3, 9, 9), (8, 3, 4, 4), 2, dtype=FLOAT)),
        (PATCHES, plain("wgrad", (2, 3, 28, 43), (8, 3, 14, 14), 14)),
        (PATCHES, last("fprop", (2, 3, 4, 8, 8), (8, 3, 2, 4, 4), (2, 4, 4))),
        (FILTERS, last("fprop", *FEW_DEPTHS["an image, causal"])),
    ],
)
def test_nvrtc_compiles_the_kernels(
    rewrite: Rewrite, problem: ConvProblem, compute_capability: tuple[int, int]
) -> None:
    recipe = rewrite.recipe(problem, rewrite.offers(problem, H200)[0].settings, H200)
    assert_compiles(recipe, compute_capability)


@pytest.mark.parametrize("at", range(3))
def test_hardly_aligned_tensors_are_left_to_cudnn(at: int) -> None:
    """Its engines for them may fault, also where it lists them."""
    aligned = {a: tuple(a if i == at else 32 for i in range(3)) for a in (2, 4, 8, 16)}
    shapes = ((2, 18, 6, 7), (10, 18, 3, 3))
    offered = {
        a: bool(PAD.offers(last("wgrad", *shapes, alignment=aligned[a]), H200)) for a in aligned
    }
    assert offered == {2: False, 4: False, 8: False, 16: True}
    check_first(PAD, last("wgrad", *shapes, alignment=aligned[16]))


@pytest.mark.parametrize("value", [1, 2, 3, 7, 8, 113, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_a_divisor_divides(value: int) -> None:
    argument = divisor(value).value
    multiplier, shift = argument & 0xFFFFFFFF, (value - 1).bit_length()
    assert argument >> 32 == value
    generator = random.Random(value)
    near = [m * value + d for m in (1, 2, 2**31 // value) for d in (-1, 0, 1)]
    for n in [0, 2**31 - 1, *near, *(generator.randrange(2**31) for _ in range(200))]:
        if 0 <= n < 2**31:
            high = n * multiplier >> 32
            assert high + n < 2**32
            assert (high + n) >> shift == n // value


def test_a_packed_tensor_is_unpacked_again() -> None:
    """Bits are moved, so NaNs keep their payload."""
    packing = Packing(2, (5, 6), 3, 8, 3, (4, 4), stride=(2, 2), phases=(2, 2), offset=(1, 2))
    copy = Copy(packing, Address("x"), Address("workspace"))
    bits = torch.randint(-(2**15), 2**15, (2, 5, 6, 3), dtype=torch.int16)
    x = between_bands(bits, torch.contiguous_format)
    room = torch.empty(packing.packed_count, dtype=torch.int16)
    buffers = {"x": x, "workspace": between_bands(room, torch.contiguous_format)}
    run_recipe(Recipe((pack([copy], HALF),)), buffers)
    packed = buffers["workspace"].reshape(3, 4, 4, 2, 8)
    assert not packed[2].any(), "there is no third image"
    assert not packed[..., 6:].any()
    assert torch.equal(packed[1, 2, 1, 1, :6], bits[1, 4, 0:2].flatten())
    x.fill_(1)
    run_recipe(Recipe((unpack([copy], HALF),)), buffers)
    assert torch.equal(x, bits)


def test_pixels_far_beside_the_image_are_zeros() -> None:
    """So far that their distance in elements takes more than 32 bits."""
    packing = Packing(
        *(1, (1, 1), 1024, 1024, 1, (1, 3)), stride=(1, 2**21), offset=(0, 2**21), limit=(1, 1)
    )
    x = between_bands(torch.randn(1024, dtype=HALF), torch.contiguous_format)
    room = torch.full((3, 1024), math.nan, dtype=HALF)
    buffers = {"x": x, "workspace": between_bands(room, torch.contiguous_format)}
    copy = Copy(packing, Address("x"), Address("workspace"))
    run_recipe(Recipe((pack([copy], HALF),)), buffers)
    assert torch.equal(buffers["workspace"][1], x)
    assert not buffers["workspace"][::2].any()


# Values that are not finite


def result_of(rewrite: Rewrite, problem: ConvProblem, name: str, at: object, value: float):
    """The result, and that in float64, with one value of an operand replaced."""
    tensors = random_tensors(problem)
    tensors[name][at] = value  # type: ignore[index]
    recipe = rewrite.recipe(problem, rewrite.offers(problem, H200)[0].settings, H200)
    workspace = torch.empty(recipe.workspace_bytes, dtype=torch.uint8)
    run_recipe(recipe, {**tensors, "workspace": between_bands(workspace, torch.contiguous_format)})
    return tensors[written(problem)], expected(problem, tensors)


def are_finite(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return results[0].isfinite(), results[1].isfinite()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("op", OPERATIONS)
def test_padding_slicing_and_gathering_spread_nothing(op: str, value: float) -> None:
    name, at = ("y", (0, 1, 2, 2)) if op != "fprop" else ("x", (0, 1, 4, 4))
    problems = [(PAD, last(op, (1, 18, 9, 9), (5, 18, 3, 3), 1, 1))]
    if op != "wgrad":
        problems.append((SLICED, last(op, (1, 1024, 9, 9), (5, 1024, 1, 1), 2)))
    if op != "dgrad":
        patches = [layout(op, (2, 3, 45, 43), (8, 3, 14, 14), 14) for layout in (last, plain)]
        problems += [(PATCHES, problem) for problem in patches]
    for rewrite, problem in problems:
        actual, by_definition = are_finite(result_of(rewrite, problem, name, at, value))
        assert not by_definition.all()
        assert torch.equal(actual, by_definition), rewrite.name


def test_space_to_depth_spreads_less_than_a_stride_farther() -> None:
    problem = last("fprop", *DEPTH_SHAPES["odd image"], dtype=FLOAT)
    at = (0, 1, 4, 5)
    actual, by_definition = are_finite(result_of(DEPTH, problem, "x", at, math.nan))
    assert not (actual & ~by_definition).any()
    farther = (~by_definition).nonzero()[:, 2:]
    for place in (by_definition & ~actual).nonzero()[:, 2:]:
        assert (farther - place).abs().amax(1).min() <= 1


def test_space_to_depth_spreads_nothing_in_wgrad() -> None:
    problem = last("wgrad", *DEPTH_SHAPES["odd image"], dtype=FLOAT)
    actual, by_definition = are_finite(result_of(DEPTH, problem, "y", (0, 1, 2, 2), math.nan))
    assert torch.equal(actual, by_definition)


def test_space_to_depth_leaves_out_what_no_output_depends_on() -> None:
    problem = last("fprop", (1, 3, 11, 13), (8, 3, 4, 4), 2, 0, dtype=FLOAT)
    actual, _ = result_of(DEPTH, problem, "x", (0, 1, 4, 12), math.nan)
    assert actual.isfinite().all()


# What is offered


@pytest.mark.parametrize(
    ("problem", "x", "w"),
    [
        (last("fprop", (2, 147, 8, 8), (64, 147, 3, 3)), 152, (64, 152)),
        (last("dgrad", (2, 6, 8, 8), (64, 6, 3, 3)), 8, (64, 8)),
        (last("wgrad", (2, 30, 8, 8), (9, 30, 3, 3)), 32, (16, 32)),
    ],
)
def test_padded_channels(problem: ConvProblem, x: int, w: tuple[int, int]) -> None:
    form = PAD.form(problem, H200)
    assert (form.inner.input_shape[1], form.inner.weight_shape[:2]) == (x, w)


def test_the_first_layer_of_a_resnet_in_depth() -> None:
    problem = last("fprop", (64, 3, 224, 224), (64, 3, 7, 7), 2, 3, dtype=FLOAT)
    form = DEPTH.form(problem, H200)
    assert form.inner.input_shape == (64, 12, 115, 115)
    assert form.inner.weight_shape == (64, 12, 4, 4)
    assert form.inner.output_shape == (64, 64, 112, 112)
    assert set(form.inner.stride) == {1}
    assert set(form.inner.padding) == {0}


def in_tf32(op: str, x: tuple[int, ...], w: tuple[int, ...], *args: object, **more: object):
    """A problem in channels_last and float32."""
    return last(op, x, w, *args, **{"dtype": FLOAT, **more})


@pytest.mark.parametrize(
    ("rewrite", "problem"),
    [
        (PAD, last("fprop", (2, 24, 8, 8), (8, 24, 3, 3), 1, 1)),
        (PAD, plain("fprop", (2, 30, 8, 8), (8, 30, 3, 3))),
        (PAD, last("fprop", (2, 12, 8, 8), (8, 12, 3, 3))),
        (PAD, last("wgrad", (2, 6, 8, 8), (8, 6, 3, 3))),
        (PAD, last("fprop", (2, 224, 8, 8), (224, 112, 3, 3), groups=2)),
        (PAD, in_tf32("fprop", (2, 224, 8, 8), (224, 112, 3, 3), groups=2)),
        (PAD, in_tf32("fprop", (2, 30, 8, 8), (8, 30, 3, 3))),
        (DEPTH, last("fprop", (2, 3, 8, 8), (8, 3, 4, 4), 4)),
        (DEPTH, in_tf32("dgrad", (2, 3, 8, 8), (8, 3, 4, 4), 4)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 4, 4), 4, allow_tf32=False)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 1, 1)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 2, 1)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 4, 4), 2, 2, 2)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 1, 1), 2)),
        (DEPTH, in_tf32("fprop", (2, 16, 8, 8), (8, 16, 4, 4), 2)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (9, 3, 4, 4), 2)),
        (DEPTH, in_tf32("fprop", (2, 3, 8, 8), (8, 3, 4, 4), 2, (2, 1, 2, 4))),
        (DEPTH, plain("fprop", (2, 3, 8, 8), (8, 3, 4, 4), 4, dtype=FLOAT)),
        (DEPTH, in_tf32("fprop", (2, 3, 28, 28), (8, 3, 14, 14), 14)),
        (PATCHES, last("fprop", (2, 3, 24, 24), (8, 3, 12, 12), 12)),
        (PATCHES, in_tf32("fprop", (2, 3, 24, 24), (8, 3, 12, 12), 12)),
        (PATCHES, last("dgrad", (2, 3, 28, 28), (8, 3, 14, 14), 14)),
        (PATCHES, last("fprop", (2, 3, 28, 28), (8, 3, 14, 14), 13)),
        (PATCHES, last("fprop", (2, 3, 28, 28), (8, 3, 14, 14), 14, 1)),
        (PATCHES, last("fprop", (2, 16, 28, 28), (8, 16, 14, 14), 14)),
        (PATCHES, last("fprop", (2, 6, 28, 28), (8, 3, 14, 14), 14, groups=2)),
        (PATCHES, last("fprop", (2, 3, 27, 27), (8, 3, 14, 14), 14, 0, 2)),
        (PATCHES, in_tf32("fprop", (2, 3, 28, 28), (8, 3, 14, 14), 14, allow_tf32=False)),
        (PATCHES, last("fprop", (2, 64, 1, 1), (8, 64, 1, 1))),
        (SLICED, last("fprop", (2, 1024, 8, 8), (8, 1024, 1, 1))),
        (SLICED, last("fprop", (2, 512, 8, 8), (8, 512, 1, 1), 2)),
        (SLICED, last("wgrad", (2, 1024, 8, 8), (8, 1024, 1, 1), 2)),
        (SLICED, last("fprop", (2, 1024, 8, 8), (8, 1024, 1, 2), 2)),
        (SLICED, last("fprop", (2, 2048, 8, 8), (8, 1024, 1, 1), 2, groups=2)),
        (SLICED, last("fprop", (2, 1024, 8, 8, 8), (8, 1024, 1, 1, 1), 2)),
        (SLICED, plain("fprop", (2, 1024, 8, 8), (8, 1024, 1, 1), 2)),
        (SLICED, in_tf32("fprop", (2, 1024, 8, 8), (8, 1024, 1, 1), 2)),
    ],
)
def test_what_would_not_pay_is_not_offered(rewrite: Rewrite, problem: ConvProblem) -> None:
    assert list(rewrite.offers(problem, H200)) == []


ODD = last("fprop", (2, 18, 8, 8), (8, 18, 3, 3))


def test_what_cudnn_cannot_be_asked_about_is_not_offered() -> None:
    assert PAD.offers(ODD, H200)
    assert not PAD.offers(ODD, replace(H200, device=None))
    assert not PAD.offers(ODD, replace(H200, compute_capability=(6, 1)))
    assert not PAD.offers(replace(ODD, dtype=BFLOAT16), gpu_of("t4"))


def test_an_inner_problem_without_engines_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise rewrites.require_cuda_build().CudnnError("no graph")

    monkeypatch.setattr(rewrites, "query", refuse)
    problem = last("fprop", (5, 18, 41, 43), (8, 18, 3, 3))
    assert PAD.form(problem, H200)
    assert not PAD.offers(problem, H200)


def test_an_inner_problem_that_is_too_large_is_not_offered() -> None:
    """Its padded input has 2**31 elements or more."""
    problem = last("fprop", (315, 17, 600, 600), (8, 17, 3, 3), 2)
    with pytest.raises(ValueError, match="input_shape"):
        PAD.form(problem, H200)
    assert not PAD.offers(problem, H200)


def test_offers_are_few_and_their_texts_lead_back() -> None:
    padded = last("fprop", (32, 100, 56, 56), (100, 100, 3, 3), 1, 1, bias=True)
    folded = in_tf32("fprop", (64, 3, 224, 224), (64, 3, 7, 7), 2, 3, bias=True)
    for rewrite, problem in ((PAD, padded), (DEPTH, folded)):
        offers = rewrite.offers(problem, H200)
        assert 1 <= len(offers) <= MOST_OFFERS
        for offer in offers:
            named = parse(of_implementation(rewrite.name, rewrite.version, offer.settings).text)
            recipe = rewrite.recipe(problem, named.settings, H200)
            assert 0 < recipe.workspace_bytes <= offer.workspace_bytes
            assert {"TENSOR_CORE", "RUNTIME_COMPILATION"} <= {
                *offer.numerical_notes,
                *offer.behavior_notes,
            }
    with pytest.raises(ValueError, match="settings"):
        PAD.recipe(padded, "eng99999", H200)
    with pytest.raises(ValueError, match="settings"):
        PAD.recipe(folded, "eng1", H200)
