"""Rewrites lead to the same result, by an engine of cuDNN for another problem."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import cuda_emulation
import pytest
import torch
from cuda_emulation import run_recipe
from cuda_emulation.checks import (
    assert_compiles,
    between_bands,
    check,
    expected,
    random_tensors,
    written,
)
from torch import Tensor

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, EngineLaunch, Kernel, KernelLaunch, Recipe
from cudnn_autotune.engines.registry import Named, parse
from cudnn_autotune.engines.rewrites import rewrite as rewrite_module
from cudnn_autotune.engines.rewrites.merge_groups import MergeGroups
from cudnn_autotune.engines.rewrites.packing import Copy, Packing, divisor, pack, unpack
from cudnn_autotune.engines.rewrites.pad_channels import PadChannels
from cudnn_autotune.engines.rewrites.rewrite import MOST_OFFERS, Rewrite
from cudnn_autotune.engines.rewrites.sliced_pointwise import SlicedPointwise
from cudnn_autotune.engines.rewrites.space_to_depth import SpaceToDepth

pytestmark = [
    pytest.mark.search,
    pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT),
]

PAD, DEPTH, MERGE, SLICED = PadChannels(), SpaceToDepth(), MergeGroups(), SlicedPointwise()
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


def one_of_each_form(rewrite: Rewrite, problem: ConvProblem, gpu: Gpu = H200) -> list[str]:
    """The settings of the first engine of each form."""
    found: dict[str, str] = {}
    for offer in rewrite.offers(problem, gpu):
        parameters, slash, _ = offer.settings.partition("/")
        found.setdefault(parameters if slash else "", offer.settings)
    return list(found.values())


def parameters(rewrite: Rewrite, problem: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [s.partition("/")[0] for s in one_of_each_form(rewrite, problem, gpu)]


def check_forms(rewrite: Rewrite, problem: ConvProblem, *, is_reversed: bool = False) -> None:
    forms = one_of_each_form(rewrite, problem)
    assert forms, f"{rewrite.name} does not offer {problem.text}"
    for settings in forms:
        check(rewrite, problem, settings, gpu=H200, is_reversed=is_reversed)


# The results


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(
    ("c", "k", "dtype"),
    [
        (3, 16, HALF),
        (3, 16, BFLOAT16),
        (1, 8, HALF),
        (4, 8, HALF),
        (6, 30, HALF),
        (16, 3, HALF),
        (3, 16, FLOAT),
    ],
)
def test_channels_are_padded(op: str, c: int, k: int, dtype: torch.dtype) -> None:
    check_forms(PAD, last(op, (2, c, 6, 7), (k, c, 3, 2), 1, 1, dtype=dtype))


@pytest.mark.parametrize("op", OPERATIONS)
def test_channels_of_groups_are_padded(op: str) -> None:
    check_forms(PAD, last(op, (2, 72, 5, 6), (72, 24, 3, 3), 1, 1, 1, 3))
    check_forms(PAD, last(op, (1, 72, 5, 6), (36, 24, 3, 3), 2, 1, 1, 3, dtype=FLOAT))
    check_forms(PAD, last(op, (1, 12, 5, 6), (20, 3, 3, 2), 2, 1, 1, 4))
    check_forms(PAD, last(op, (1, 16, 5, 6), (24, 8, 1, 2), 1, 0, 1, 2))


def test_channels_of_three_dimensions_are_padded() -> None:
    for op in OPERATIONS:
        check_forms(PAD, last(op, (1, 3, 3, 4, 5), (10, 3, 2, 3, 3), (1, 2, 2), 1))


DEPTH_SHAPES = {
    "7x7": ((2, 3, 14, 18), (8, 3, 7, 7), 2, 3),
    "odd image": ((1, 3, 13, 9), (16, 3, 7, 7), 2, 3),
    "3x3": ((2, 3, 9, 8), (8, 3, 3, 3), 2, 1),
    "one channel": ((2, 1, 8, 11), (8, 1, 5, 5), 2, 2),
    "four channels": ((1, 4, 9, 10), (8, 4, 3, 3), 2, 1),
    "five channels": ((1, 5, 9, 10), (8, 5, 4, 3), 2, 1),
    "patches": ((2, 3, 8, 12), (8, 3, 4, 4), 4, 0),
    "overlapping patches": ((1, 3, 17, 12), (8, 3, 7, 7), 4, 3),
    "other strides": ((1, 3, 11, 14), (8, 3, 5, 4), (1, 2), (2, 0)),
    "stride of three": ((1, 2, 12, 14), (8, 2, 3, 4), 3, 1),
    "other padding": ((1, 3, 8, 9), (8, 3, 3, 3), 2, (0, 1, 1, 2)),
    "much padding": ((1, 3, 2, 3), (8, 3, 3, 4), 2, (2, 3)),
    "image smaller than the kernel": ((1, 3, 2, 1), (8, 3, 7, 7), 2, 3),
    "depth": ((1, 3, 4, 6, 7), (8, 3, 3, 3, 3), (1, 2, 2), 1),
    "strided depth": ((2, 2, 5, 6, 7), (8, 2, 3, 3, 3), 2, (1, 1, 1, 0, 0, 1)),
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", DEPTH_SHAPES)
def test_a_stride_becomes_channels(op: str, name: str) -> None:
    check_forms(DEPTH, last(op, *DEPTH_SHAPES[name]))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
def test_a_stride_becomes_channels_in_other_types(op: str, dtype: torch.dtype) -> None:
    check_forms(DEPTH, last(op, *DEPTH_SHAPES["7x7"], dtype=dtype))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("make", [last, plain])
@pytest.mark.parametrize(
    ("c", "k", "groups", "kernel", "dtype"),
    [
        (64, 64, 8, (3, 3), HALF),
        (72, 72, 3, (3, 2), HALF),
        (64, 128, 8, (1, 1), BFLOAT16),
        (60, 40, 5, (3, 3), FLOAT),
    ],
)
def test_groups_are_merged(
    op: str,
    make: Callable[..., ConvProblem],
    c: int,
    k: int,
    groups: int,
    kernel: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    w = (k, c // groups, *kernel)
    problem = make(op, (2, c, 5, 6), w, (2, 1), 1, 1, groups, dtype=dtype)
    assert len(one_of_each_form(MERGE, problem)) == (3 if c // groups == 8 else 1)
    check_forms(MERGE, problem)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("make", [last, plain])
@pytest.mark.parametrize(
    ("x", "stride", "padding"),
    [
        ((2, 16, 8, 8), 2, 0),
        ((3, 7, 9, 5), (3, 2), 0),
        ((1, 12, 7, 10), (1, 2), (1, 2, 0, 3)),
        ((1, 8, 2, 2), 4, 6),
        ((2, 6, 3, 5, 6), (1, 2, 2), (1, 0, 1)),
    ],
)
def test_pixels_of_a_pointwise_are_gathered(
    op: str, make: Callable[..., ConvProblem], x: tuple[int, ...], stride: object, padding: object
) -> None:
    check_forms(SLICED, make(op, x, (8, x[1], *(1,) * (len(x) - 2)), stride, padding))


@pytest.mark.parametrize("op", OPERATIONS)
def test_samples_of_a_pointwise_are_gathered(op: str) -> None:
    check_forms(SLICED, plain(op, (2, 5, 11), (4, 5, 1), 3, 1))
    check_forms(SLICED, plain(op, (2, 5, 11), (4, 5, 1), 3, 1, dtype=FLOAT, allow_tf32=False))


@pytest.mark.parametrize("activation", ["", "relu"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_engine_has_the_epilogue(activation: str, residual: bool) -> None:
    fused = {"bias": True, "residual": residual, "activation": activation}
    first = last("fprop", (2, 3, 9, 8), (16, 3, 3, 3), 2, 1, **fused)
    for rewrite in (PAD, DEPTH):
        check_forms(rewrite, first)
    check_forms(MERGE, last("fprop", (1, 32, 4, 5), (32, 8, 3, 3), 1, 1, 1, 4, **fused))
    check_forms(SLICED, last("fprop", (1, 8, 4, 5), (8, 8, 1, 1), 2, **fused))
    few = last("fprop", (1, 8, 4, 5), (3, 8, 3, 3), 1, 1, **fused)
    wide = last("fprop", (1, 72, 4, 5), (72, 24, 3, 3), 1, 1, 1, 3, **fused)
    if residual:
        assert not PAD.offers(few, H200), "the residual would have to be padded"
        assert not PAD.offers(wide, H200)
    else:
        check_forms(PAD, few)
        check_forms(PAD, wide)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_order_of_threads_does_not_matter(op: str) -> None:
    """The images fill more than one block, and the last one not wholly."""
    check_forms(PAD, last(op, (2, 3, 61, 47), (10, 3, 1, 2)), is_reversed=True)
    check_forms(DEPTH, last(op, (2, 3, 61, 47), (8, 3, 3, 3), 2, 1), is_reversed=True)
    check_forms(SLICED, last(op, (2, 24, 33, 31), (8, 24, 1, 1), 2), is_reversed=True)


def test_random_problems() -> None:
    generator = random.Random(0)
    widths = [(2, 6, 10), (1, 3, 8), (1, 4, 16), (1, 6, 5), (1, 16, 3), (4, 4, 16), (6, 8, 8)]
    checked = dict.fromkeys((PAD, DEPTH, MERGE, SLICED), 0)
    for _ in range(500):
        kernel = generator.choice([(1, 1), (3, 3), (2, 3), (5, 4), (1, 3)])
        padding = [generator.randrange(max(k, 2)) for k in kernel * 2]
        dilation = generator.choice([1, 1, 1, 2])
        least = [dilation * (k - 1) + 1 - p for k, p in zip(kernel, padding, strict=False)]
        size = [generator.randint(max(1, some), 13) for some in least]
        groups, c, k = generator.choice(widths)
        make = generator.choice([last, plain])
        problem = make(
            generator.choice(OPERATIONS),
            (generator.randint(1, 3), groups * c, *size),
            (groups * k, c, *kernel),
            generator.choices([1, 2, 2, 3], k=2),
            padding,
            dilation,
            groups,
            deterministic=generator.random() < 0.5,
        )
        for rewrite in checked:
            for settings in one_of_each_form(rewrite, problem):
                check(rewrite, problem, settings, gpu=H200, seed=checked[rewrite])
                checked[rewrite] += 1
    assert min(checked.values()) >= 20, checked.values()


# The launches


def kernels(recipe: Recipe) -> list[dict[str, str | int]]:
    found = []
    for launch in recipe.launches:
        if isinstance(launch, KernelLaunch):
            assert isinstance(launch.kernel, Kernel)
            found.append(dict(launch.kernel.defines))
    return found


def test_a_direction_takes_one_launch_before_the_engine_and_one_behind_it() -> None:
    problem = last("wgrad", (2, 3, 6, 7), (10, 3, 3, 3), 1, 1)
    recipe = PAD.recipe(problem, PAD.offers(problem, H200)[0].settings, H200)
    before, engine, behind = recipe.launches
    assert isinstance(before, KernelLaunch)
    assert isinstance(engine, EngineLaunch)
    assert isinstance(behind, KernelLaunch)
    assert [k["TENSORS"] for k in kernels(recipe)] == [2, 1]
    assert {a.buffer for a in (engine.x, engine.w, engine.y)} == {"workspace"}
    assert engine.problem.weight_shape == (16, 4, 3, 3)


@pytest.mark.parametrize("compute_capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("rewrite", "problem"),
    [
        (PAD, last("wgrad", (2, 3, 6, 7), (10, 3, 3, 3), bias=False)),
        (PAD, last("fprop", (2, 3, 6, 7), (10, 3, 3, 3), bias=True)),
        (DEPTH, last("dgrad", (2, 3, 9, 9), (8, 3, 3, 3), 2)),
        (DEPTH, last("wgrad", (2, 3, 9, 9), (8, 3, 3, 3), 2, dtype=FLOAT)),
        (MERGE, plain("wgrad", (2, 72, 5, 5), (72, 24, 3, 3), groups=3)),
    ],
)
def test_nvrtc_compiles_the_kernels(
    rewrite: Rewrite, problem: ConvProblem, compute_capability: tuple[int, int]
) -> None:
    recipe = rewrite.recipe(problem, rewrite.offers(problem, H200)[0].settings, H200)
    assert_compiles(recipe, compute_capability)


def test_accesses_are_as_wide_as_addresses_allow() -> None:
    def widths(alignment: int) -> list[tuple[int, int]]:
        problem = last("dgrad", (1, 32, 6, 6), (32, 32, 1, 1), 2, alignment=(alignment,) * 3)
        recipe = SLICED.recipe(problem, SLICED.offers(problem, H200)[0].settings, H200)
        return [(int(k["VECTOR"]), int(k["LOAD"])) for k in kernels(recipe)]

    assert [widths(a) for a in (32, 16, 8, 2)] == [[(8, 8)], [(8, 8)], [(4, 4)], [(1, 1)]]


@pytest.mark.parametrize(
    ("x", "w", "stride", "padding", "load"),
    [
        ((1, 3, 64, 64), (8, 3, 16, 16), 16, 0, 8),
        ((1, 3, 16, 16), (8, 3, 4, 4), 4, 0, 4),
        ((1, 3, 16, 15), (8, 3, 4, 4), 4, 0, 1),
        ((1, 3, 16, 16), (8, 3, 4, 4), 4, (0, 2), 2),
        ((1, 4, 16, 16), (8, 4, 3, 3), 2, 1, 4),
    ],
)
def test_pixels_are_loaded_together(
    x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: object, load: int
) -> None:
    problem = last("fprop", x, w, stride, padding)
    recipe = DEPTH.recipe(problem, DEPTH.offers(problem, H200)[0].settings, H200)
    assert [k["LOAD"] for k in kernels(recipe)] == [load]
    check_forms(DEPTH, problem)


def test_an_engine_knows_what_is_aligned() -> None:
    """What lies in the workspace is; the output is where the caller has it."""
    problem = last("fprop", (1, 3, 8, 8), (8, 3, 3, 3), 2, 1, alignment=(2, 4, 16))
    form = DEPTH.forms(problem, H200)[0]
    assert form.inner.alignment == (32, 32, 16)
    check_forms(DEPTH, problem)


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
    copy = Copy(packing, Address("x"), Address("workspace"), 2)
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
def test_padding_and_slicing_spread_nothing(op: str, value: float) -> None:
    name, at = ("y", (0, 1, 2, 2)) if op != "fprop" else ("x", (0, 1, 4, 4))
    for rewrite, problem in (
        (PAD, last(op, (1, 3, 9, 9), (5, 3, 3, 3), 1, 1)),
        (SLICED, last(op, (1, 3, 9, 9), (5, 3, 1, 1), 2)),
    ):
        actual, by_definition = are_finite(result_of(rewrite, problem, name, at, value))
        assert not by_definition.all()
        assert torch.equal(actual, by_definition), rewrite.name


@pytest.mark.parametrize("op", OPERATIONS)
def test_merged_groups_spread_within_a_pixel(op: str) -> None:
    name, at = ("y", (0, 9, 2, 2)) if op != "fprop" else ("x", (0, 9, 4, 4))
    problem = last(op, (1, 64, 9, 9), (64, 8, 3, 3), 1, 1, 1, 8)
    actual, by_definition = are_finite(result_of(MERGE, problem, name, at, math.nan))
    if op == "wgrad":
        assert torch.equal(actual, by_definition)
    else:
        assert torch.equal(actual.all(1), by_definition.all(1))
        assert actual[:, 32:].all(), "these are of another merged group"


@pytest.mark.parametrize("op", OPERATIONS)
def test_space_to_depth_spreads_less_than_a_stride_farther(op: str) -> None:
    problem = last(op, (1, 3, 11, 12), (8, 3, 3, 3), 2, 0)
    name, at = ("y", (0, 1, 2, 2)) if op != "fprop" else ("x", (0, 1, 4, 5))
    actual, by_definition = are_finite(result_of(DEPTH, problem, name, at, math.nan))
    if op == "wgrad":
        assert torch.equal(actual, by_definition)
        return
    assert not (actual & ~by_definition).any()
    farther = (~by_definition).nonzero()[:, 2:]
    for y, x in (by_definition & ~actual).nonzero()[:, 2:]:
        reach = 1  # an output has one pixel behind its window, a pixel one window
        assert (farther - torch.stack([y, x])).abs().amax(1).min() <= reach


def test_space_to_depth_leaves_out_what_no_output_depends_on() -> None:
    problem = last("fprop", (1, 3, 11, 12), (8, 3, 3, 3), 2, 0)
    actual, _ = result_of(DEPTH, problem, "x", (0, 1, 4, 11), math.nan)
    assert actual.isfinite().all()


# What is offered


@pytest.mark.parametrize(
    ("rewrite", "problem", "what"),
    [
        (PAD, last("fprop", (2, 3, 8, 8), (16, 3, 3, 3)), ["C=4,K=16", "C=8,K=16"]),
        (PAD, last("wgrad", (2, 30, 8, 8), (9, 30, 3, 3)), ["C=32,K=16"]),
        (PAD, last("dgrad", (2, 3, 8, 8), (6, 3, 3, 3), dtype=FLOAT), ["C=4,K=8"]),
        (PAD, last("fprop", (2, 72, 8, 8), (36, 24, 3, 3), groups=3), ["C=96,K=48"]),
        (MERGE, last("fprop", (2, 128, 8, 8), (128, 4, 3, 3), groups=32), [8, 4, 2]),
        (MERGE, last("fprop", (2, 256, 8, 8), (256, 16, 3, 3), groups=16), [8, 4, 1]),
        (MERGE, last("fprop", (2, 216, 8, 8), (216, 24, 3, 3), groups=9), [1]),
    ],
)
def test_forms(rewrite: Rewrite, problem: ConvProblem, what: list[object]) -> None:
    expected_ = [f"GROUPS={w}" if isinstance(w, int) else w for w in what]
    assert parameters(rewrite, problem) == expected_


def test_the_first_layer_of_a_resnet_in_depth() -> None:
    form = DEPTH.forms(last("fprop", (64, 3, 224, 224), (64, 3, 7, 7), 2, 3), H200)[0]
    assert form.inner.input_shape == (64, 16, 115, 115)
    assert form.inner.weight_shape == (64, 16, 4, 4)
    assert form.inner.output_shape == (64, 64, 112, 112)
    assert set(form.inner.stride) == {1}
    assert set(form.inner.padding) == {0}


DENSE = last("fprop", (2, 8, 8, 8), (8, 8, 3, 3), 1, 1)


@pytest.mark.parametrize(
    ("rewrite", "problem"),
    [
        (PAD, DENSE),
        (PAD, plain("fprop", (2, 3, 8, 8), (8, 3, 3, 3))),
        (PAD, last("fprop", (2, 8, 8, 8), (8, 4, 3, 3), groups=2)),
        (PAD, last("fprop", (2, 32, 8, 8), (32, 1, 3, 3), groups=32)),
        (PAD, last("fprop", (2, 3, 8, 8), (8, 3, 3, 3), dtype=FLOAT, allow_tf32=False)),
        (PAD, last("fprop", (2, 3, 8, 8), (8, 3, 3, 3), dtype=torch.float64)),
        (DEPTH, DENSE),
        (DEPTH, last("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 1, 1)),
        (DEPTH, last("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 2, 2, 2)),
        (DEPTH, last("fprop", (2, 3, 8, 8), (8, 3, 1, 1), 2)),
        (DEPTH, last("fprop", (2, 16, 8, 8), (8, 16, 3, 3), 2)),
        (DEPTH, last("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 2, (2, 1, 2, 3))),
        (DEPTH, plain("fprop", (2, 3, 8, 8), (8, 3, 3, 3), 2)),
        (DEPTH, last("fprop", (2, 8, 32, 32), (8, 8, 9, 9), 8 - 4)),
        (MERGE, DENSE),
        (MERGE, last("fprop", (2, 32, 8, 8), (32, 1, 3, 3), groups=32)),
        (MERGE, last("fprop", (2, 256, 8, 8), (256, 128, 3, 3), groups=2)),
        (MERGE, last("fprop", (2, 20, 8, 8), (20, 10, 3, 3), groups=2)),
        (MERGE, last("fprop", (2, 576, 8, 8), (576, 24, 3, 3), groups=24)),
        (SLICED, last("fprop", (2, 8, 8, 8), (8, 8, 1, 1))),
        (SLICED, last("fprop", (2, 8, 8, 8), (8, 8, 1, 2), 2)),
        (SLICED, last("fprop", (2, 8, 8, 8), (8, 4, 1, 1), 2, groups=2)),
        (SLICED, last("fprop", (2, 8, 8, 8, 8), (8, 8, 1, 1, 1), 2)),
        (SLICED, plain("fprop", (2, 8, 8, 8), (8, 8, 1, 1), 2, dtype=torch.float64)),
    ],
)
def test_what_would_not_pay_is_not_offered(rewrite: Rewrite, problem: ConvProblem) -> None:
    assert list(rewrite.offers(problem, H200)) == []


def test_what_cudnn_cannot_be_asked_about_is_not_offered() -> None:
    problem = last("fprop", (2, 3, 8, 8), (8, 3, 3, 3))
    assert PAD.offers(problem, H200)
    assert not PAD.offers(problem, replace(H200, device=None))
    assert not PAD.offers(problem, replace(H200, compute_capability=(6, 1)))
    assert not PAD.offers(replace(problem, dtype=BFLOAT16), gpu_of("t4"))


def test_an_inner_problem_without_engines_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise rewrite_module.require_cuda_build().CudnnError("no graph")

    monkeypatch.setattr(rewrite_module, "query", refuse)
    problem = last("fprop", (5, 3, 41, 43), (8, 3, 3, 3))
    assert PAD.forms(problem, H200)
    assert not PAD.offers(problem, H200)


def test_an_inner_problem_that_is_too_large_is_not_offered() -> None:
    """Its padded input has 2**31 elements or more."""
    problem = last("fprop", (1300, 3, 600, 600), (8, 3, 3, 3), 2)
    with pytest.raises(ValueError, match="input_shape"):
        PAD.forms(problem, H200)
    assert not PAD.offers(problem, H200)


def test_offers_are_few_and_their_texts_lead_back() -> None:
    problem = last("fprop", (64, 3, 224, 224), (64, 3, 7, 7), 2, 3, bias=True)
    for rewrite in (PAD, DEPTH):
        offers = rewrite.offers(problem, H200)
        assert 3 <= len(offers) <= MOST_OFFERS
        for offer in offers:
            named = parse(Named(rewrite.name, rewrite.version, offer.settings).text)
            recipe = rewrite.recipe(problem, named.settings, H200)
            assert 0 < recipe.workspace_bytes <= offer.workspace_bytes
            assert {"TENSOR_CORE", "RUNTIME_COMPILATION"} <= {
                *offer.numerical_notes,
                *offer.behavior_notes,
            }
    with pytest.raises(ValueError, match="settings"):
        PAD.recipe(problem, "C=4,K=64/eng99999", H200)


def test_versions_differ() -> None:
    assert len({rewrite.version for rewrite in (PAD, DEPTH, MERGE, SLICED)}) == 4
