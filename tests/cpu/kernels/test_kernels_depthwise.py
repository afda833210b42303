"""What is special to the depthwise kernels, in the emulation of CUDA; ``test_battery.py`` has what
they have in common with others."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from support import cuda_emulation
from support.conv.references import expected
from support.covering import covering
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors, written
from support.kernels.battery import TINY, Family, offered_settings
from support.kernels.depthwise import (
    BF16,
    DEPTHWISE,
    FP32,
    MMA,
    PLAIN,
    PLANES,
    TILE,
    WGRAD,
    WGRAD_MMA,
    depthwise,
    same,
    wgrad,
)
from support.kernels.not_finite import scatter
from torch import Tensor

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise_tile import block_tiles
from cudnn_autotune.kernels.family import KernelFamily

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (DEPTHWISE.kernel, depthwise("fprop", 16, (6, 6), (3, 3), stride=2, alignment=(32, 32, 2))),
        (DEPTHWISE.kernel, depthwise("dgrad", 16, (6, 6), (3, 3), stride=2, alignment=(32, 32, 2))),
        (WGRAD.kernel, wgrad(2, 16, (6, 6), (3, 3), stride=2, alignment=(32, 32, 2))),
        # the sums of a block of two channels a thread exceed 48 KiB of shared memory, or registers
        (WGRAD.kernel, wgrad(1, 256, (7, 7), (7, 7), stride=2, padding=3)),
        (WGRAD.kernel, wgrad(1, 8, (3, 8, 7), (3, 7, 7), padding=3, dtype=BF16)),
    ],
)
def test_a_thread_has_one_channel_where_it_cannot_have_two(
    kernel: KernelFamily, problem: ConvProblem
) -> None:
    offered = offered_settings(kernel, problem, H200)
    assert offered
    for settings in offered:
        assert "CHANNELS=1," in settings
        check(kernel, problem, settings)


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_rows_that_are_hardly_aligned_are_read_one_by_one(op: str) -> None:
    problem = depthwise(op, 3, (8, 16), (3, 3), stride=2, alignment=(32, 32, 2), **PLAIN)
    recipe = PLANES.kernel.recipe(problem, PLANES.settings_of(problem)[0], H200)
    assert {("VECTOR_IN", 1), ("VECTOR_OUT", 1)} <= set(recipe.launches[0].kernel.defines)


# Tiles in shared memory


@pytest.mark.basic(1)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_many_rows_of_a_thread(op: str) -> None:
    """On a GPU of one multiprocessor tiles are as large as on others those of many images."""
    problem = depthwise(op, 32, (57, 41), (3, 3), stride=2, padding=1)
    tile = block_tiles(problem, TINY)[0]
    assert tile.rows >= 3
    check(TILE.kernel, problem, tile.settings, gpu=TINY)


def test_an_older_gpu_has_no_tiles() -> None:
    older = dataclasses.replace(H200, compute_capability=(7, 5))
    assert not block_tiles(depthwise("fprop", 32, (18, 18), (3, 3), stride=2), older)


# Tensor cores


@pytest.mark.basic(2)
@pytest.mark.parametrize("problem", MMA.spoilt, ids=lambda problem: problem.text)
def test_what_is_not_finite_reaches_what_depends_on_it(problem: ConvProblem) -> None:
    """Also where the matrices of the filter have zeros, and where two infinities meet."""
    tensors = random_tensors(problem)
    read = tensors["y" if problem.op == "dgrad" else "x"]
    read[0, 3, 5, 9] = torch.nan
    read[1, 3, 0, 0] = torch.inf
    read[1, 4, 11, 25] = -torch.inf
    read[1, 5, 6, 6:8] = torch.tensor([torch.inf, -torch.inf])
    tensors["w"][7, 0, 1, 2] = torch.inf
    # Whether padding is multiplied by an infinite weight is not defined.
    inside = (slice(None), [*range(7), *range(8, 16)])
    settings = MMA.settings_of(problem)[0]
    check_not_finite(MMA.kernel, problem, settings, tensors, inside=inside)


@pytest.mark.basic(4)
@pytest.mark.parametrize("pattern", ["one", "sparse", "dense", "zeros", "signs"])
@pytest.mark.parametrize(
    "problem",
    [
        same(3, 24, (13, 56), (7, 7), dtype=BF16),
        same(9, 16, (14, 14), (7, 7), "dgrad"),
        same(17, 8, (7, 7), (7, 7), bias=True, residual=True, activation="relu"),
        same(1, 8, (5, 120), (5, 5), "dgrad"),
        same(1, 8, (18, 18), (31, 31), "dgrad"),
        same(2, 16, (12, 19), (3, 11), dtype=BF16, **PLAIN),
        same(2, 16, (23, 9), (11, 1)),
        same(2, 24, (300,), (31,), "dgrad", padding=(30, 0), **PLAIN),
    ],
    ids=lambda problem: problem.text,
)
def test_signs_of_infinities(problem: ConvProblem, pattern: str) -> None:
    """Infinities and NaN anywhere, weights of zero and of one sign, and more outputs to compute
    again than a block lists at a time."""
    tensors = random_tensors(problem)
    read = tensors["y" if problem.op == "dgrad" else "x"]
    generator = torch.Generator().manual_seed(3)
    taps = min(200, math.prod(problem.weight_shape[2:]))
    share = {"sparse": 0.1, "dense": 1.0}.get(pattern, 0.3) / taps
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    places = torch.rand(read.shape, generator=generator) < share
    if pattern == "one":
        places[:] = False
        places[(-1, 3, *(size // 2 for size in read.shape[2:]))] = True
    drawn = torch.randint(3, read.shape, generator=generator)
    read.copy_(torch.where(places, values[drawn].to(read.dtype), read))
    if pattern == "zeros":
        tensors["w"][:, :, ..., ::2] = 0.0
        tensors["w"][::2] *= -0.0
    if pattern == "signs":
        tensors["w"].abs_()
    check_not_finite(MMA.kernel, problem, MMA.settings_of(problem)[0], tensors)


def test_infinities_at_the_borders_of_a_tensor() -> None:
    """Nothing is read outside of it: NaN lies there."""
    for op, layout in (("fprop", {}), ("dgrad", PLAIN)):
        problem = same(2, 8, (13, 27), (7, 7), op, **layout)
        tensors = random_tensors(problem)
        read = tensors["y" if op == "dgrad" else "x"]
        read[0, :, 0, 0] = read[-1, :, -1, -1] = torch.inf
        check_not_finite(MMA.kernel, problem, MMA.settings_of(problem)[0], tensors)


def _rows(begin: int, end: int | None, step: int = 1) -> Callable[[Tensor], None]:
    """NaN in some rows of the input, or columns of a signal."""

    def write(read: Tensor) -> None:
        read.movedim(2, 0)[begin:end:step] = torch.nan

    return write


def _corner(read: Tensor) -> None:
    """NaN but in two corners: a few outputs of the last one are finite, and the first one has
    infinities."""
    wide = [min(size, 5) for size in read.shape[2:]]
    corner = (..., *(slice(-size, None) for size in wide))
    kept = read[corner].clone()
    read.fill_(torch.nan)
    read[corner] = kept
    read[(..., *(slice(0, size // 2) for size in wide))] = torch.inf


FULL: dict[str, Callable[[Tensor], None]] = {
    "NaN": lambda read: read.fill_(torch.nan),
    "infinite": lambda read: read.fill_(torch.inf),
    "both signs": lambda read: read.copy_(read.sign() * torch.inf),
    "first row": _rows(0, 1),
    "first rows": _rows(0, -9),
    "even rows": _rows(0, None, 2),
    "odd rows": _rows(1, None, 2),
    "all but a corner": _corner,
}
"""Name -> what fills the first rows of a tensor, or all of it."""
WEIGHTS: dict[str, Callable[[Tensor], None]] = {
    "normal": lambda w: None,
    "positive": lambda w: w.abs_(),
    "zero": lambda w: w.flatten(1)[:, ::2].zero_(),
    "infinite": lambda w: w[0].flatten()[3:5].fill_(torch.inf),
}


@pytest.mark.basic(6)
@covering(
    problem={
        problem.text: problem
        for problem in (
            same(3, 40, (21, 17), (7, 7)),
            same(2, 24, (13, 56), (7, 7), dtype=BF16, bias=True, residual=True, activation="relu"),
            same(9, 16, (14, 14), (7, 7), "dgrad"),
            depthwise("dgrad", 16, (20, 26), (7, 7), dtype=BF16),
            same(2, 24, (16, 24), (5, 5), bias=True, residual=True, activation="silu", **PLAIN),
            same(2, 24, (19, 18), (5, 5), "dgrad", padding=(3, 1), dtype=BF16, **PLAIN),
            same(1, 8, (18, 18), (31, 31), "dgrad"),
            same(1, 8, (18, 18), (31, 31), **PLAIN),
            same(1, 16, (34, 40), (13, 13), dtype=BF16, **PLAIN),
            same(2, 24, (300,), (31,), "dgrad", padding=(30, 0), **PLAIN),
        )
    },
    fill=FULL,
    weights=WEIGHTS,
)
def test_a_first_row_full_of_nan(
    problem: ConvProblem, fill: Callable[[Tensor], None], weights: Callable[[Tensor], None]
) -> None:
    """A block stops after it if the rest is NaN too, and else computes all its rows."""
    tensors = random_tensors(problem)
    fill(tensors["y" if problem.op == "dgrad" else "x"])
    weights(tensors["w"])
    tensors[written(problem)].fill_(1.0)  # NaN there has to be written
    # Whether padding is multiplied by an infinite weight is not defined.
    inside = (slice(None), slice(not tensors["w"][0].isfinite().all(), None))
    few, many = MMA.settings_of(problem)[0], MMA.settings_of(problem, TINY)
    most_channels = max(many, key=lambda settings: int(settings.split(",")[0].split("=")[1]))
    for gpu, settings in ((H200, few), (TINY, many[0]), (TINY, most_channels)):
        check_not_finite(
            MMA.kernel, problem, settings, tensors, gpu=gpu, inside=inside, is_full=True
        )


@pytest.mark.parametrize("fill", ["NaN", "infinite", "both signs", "all but a corner"])
def test_the_walk_stops_after_a_first_row_full_of_nan(fill: str) -> None:
    problem = same(3, 16, (40, 24), (7, 7))
    recipe = MMA.kernel.recipe(problem, MMA.settings_of(problem, TINY)[0], TINY)
    products = []
    for change in (lambda read: None, FULL[fill]):
        tensors = random_tensors(problem)
        change(tensors["x"])
        WORK.products = 0
        cuda_emulation.run_recipe(recipe, tensors)
        products.append(WORK.products)
    assert products[1] < products[0] / 3


# Gradients of the weight


def test_depths_of_taps_are_divided_among_blocks() -> None:
    """Where the sums of all do not fit into a thread's registers."""
    problem = wgrad(1, 8, (4, 8, 9), (3, 5, 5), padding=2, stride=2)
    offered = WGRAD.settings_of(problem)
    assert offered
    for settings in offered:
        assert "DEPTHS=1," in settings
        check(WGRAD.kernel, problem, settings)


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (WGRAD.kernel, wgrad(64, 96, (112, 112), (3, 3), stride=2, padding=1)),
        (WGRAD_MMA.kernel, wgrad(64, 96, (56, 56), (7, 7), padding=3)),
    ],
)
def test_sums_are_divided_among_few_blocks(kernel: KernelFamily, problem: ConvProblem) -> None:
    """The partial sums are few next to the tensors."""
    for offer in kernel.offers(problem, H200):
        assert 0 < offer.workspace_bytes <= 2 << 20
        recipe = kernel.recipe(problem, offer.settings, H200)
        assert recipe.workspace_bytes == offer.workspace_bytes
        assert recipe.launches[0].grid[0] >= (100 if kernel is WGRAD.kernel else 133)


# Weight gradients


@pytest.mark.basic(4)
@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (WGRAD, wgrad(2, 16, (13, 13), (3, 3), padding=1)),
        (WGRAD, wgrad(2, 16, (11, 19), (3, 3), stride=2, dtype=FP32)),
        (WGRAD, wgrad(2, 8, (9, 23), (3, 3), dilation=(1, 2), padding=2, dtype=BF16)),
        (WGRAD, wgrad(2, 8, (3, 6, 9), (2, 3, 3), padding=1)),
        (WGRAD_MMA, wgrad(3, 16, (14, 14), (7, 7), padding=3)),
        (WGRAD_MMA, wgrad(2, 16, (21, 22), (7, 7), dtype=BF16)),
        (WGRAD_MMA, wgrad(2, 8, (12, 70), (5, 5), padding=2)),
        (WGRAD_MMA, wgrad(2, 8, (10, 14), (7, 7), padding=3, **PLAIN)),
        (WGRAD_MMA, wgrad(2, 5, (9, 13), (7, 7), **PLAIN)),
        (WGRAD_MMA, wgrad(1, 4, (20, 18), (31, 31), padding=15)),
        (WGRAD_MMA, wgrad(2, 8, (301,), (31,), **PLAIN)),
        (WGRAD_MMA, wgrad(2, 4, (1, 77), (1, 9), padding=(0, 4))),
        (WGRAD_MMA, wgrad(2, 8, (12, 12), (4, 6), padding=(0, 6, 2, 1))),
    ],
    ids=lambda value: getattr(value, "text", None),
)
def test_what_is_not_finite_near_the_end_of_lines(family: Family, problem: ConvProblem) -> None:
    """Tiles that reach beyond the image, where zeros meet it."""
    for gpu in (H200, TINY):
        for settings in family.settings_of(problem, gpu)[: family.most]:
            for seed in range(8):
                tensors = random_tensors(problem)
                scatter(tensors["x" if seed % 4 else "y"], seed)
                check_not_finite(family.kernel, problem, settings, tensors, gpu=gpu)


@pytest.mark.parametrize("size", [(7, 7), (13, 11)])
def test_images_full_of_what_is_not_finite(size: tuple[int, int]) -> None:
    """Half of the channels of one image, and then of the last columns; all of dy is positive."""
    problem = wgrad(2, 16, size, (7, 7), padding=3)
    settings = WGRAD_MMA.settings_of(problem, TINY)[0]
    for place in ((0, slice(0, 7)), (slice(None), slice(0, 7), slice(None), -1)):
        for value in (torch.nan, torch.inf):
            tensors = random_tensors(problem)
            tensors["y"].abs_()
            tensors["x"][place] = value
            check_not_finite(WGRAD_MMA.kernel, problem, settings, tensors, gpu=TINY)


def test_rows_of_zeros_before_a_chained_filter_meet_infinities() -> None:
    """An infinity just below an output's window meets a row of zeros that fills up the chain of
    warps, and here more outputs than are computed one by one."""
    problem = ConvProblem(
        "fprop",
        (3, 24, 37, 47),
        (24, 1, 13, 13),
        padding=(1, 0),
        groups=24,
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )
    tensors, rng = random_tensors(problem), random.Random(0)
    for channel in range(24):
        image, row, column = (rng.randrange(size) for size in (3, 37, 47))
        tensors["x"][image, channel, row, column] = (-1) ** channel * math.inf
    settings = MMA.settings_of(problem)[0]
    cuda_emulation.run_recipe(MMA.kernel.recipe(problem, settings, H200), tensors)
    found, right = tensors["y"].float(), expected(problem, tensors).float()
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found.isinf() * found.sign(), right.isinf() * right.sign())
