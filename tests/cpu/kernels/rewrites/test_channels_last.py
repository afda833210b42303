"""Contiguous problems by kernels for channels_last, and the transpositions around them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import run_recipe
from support.cuda_emulation.checks import (
    H200,
    are_bands_whole,
    assert_compiles,
    between_bands,
    check,
)
from support.kernels.random_problems import KINDS, random_problem

from cudnn_autotune.engines.candidate_id import of_implementation, parse
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Recipe
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.rewrites.channels_last import ChannelsLast
from cudnn_autotune.kernels.rewrites.transpose import Transposition, transpose

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

RELAYOUT = ChannelsLast()
HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
BITS = {HALF: torch.int16, FLOAT: torch.int32}
X, Y = Address("x"), Address("y")


def plain(op: str, x: tuple[int, ...], w: tuple[int, ...], *args: object, **more: object):
    """A contiguous problem, in float16 unless another dtype is given."""
    return ConvProblem(op, x, w, *args, **{"dtype": HALF, **more})  # type: ignore[arg-type]


# The transposition

MATRICES = {
    "whole vectors": (3, 64, 784),
    "parts of vectors at the ends of tiles": (2, 72, 200),
    "seven by seven": (2, 136, 49),
    "fourteen by fourteen": (2, 104, 196),
    "many odd": (2, 333, 361),
    "odd lines that are long": (3, 3, 5625),
    "lines of one vector and one more": (1, 9, 4097),
    "few channels": (2, 3, 4096),
    "one of eight channels": (1, 8, 3136),
    "two channels": (3, 2, 2051),
    "filters": (70, 24, 9),
    "filters of a first layer": (130, 3, 49),
    "single elements": (5, 1, 1),
    "a line": (2, 1, 77),
}


def transposed(images: int, rows: int, columns: int, dtype: torch.dtype, is_reversed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(-(2**15), 2**15, (images, rows, columns), generator=generator)
    x = between_bands(source.to(BITS[dtype]), torch.contiguous_format, 16)
    room = torch.full((images, columns, rows), -1, dtype=BITS[dtype])
    y = between_bands(room, torch.contiguous_format, 16)
    launch = transpose([Transposition(X, Y, images, rows, columns)], dtype)
    run_recipe(Recipe((launch,)), {"x": x, "y": y}, is_reversed=is_reversed)
    assert torch.equal(y, x.transpose(1, 2))
    assert torch.equal(x, source.to(BITS[dtype]))
    assert are_bands_whole(y)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", MATRICES)
def test_each_image_is_transposed(name: str, dtype: torch.dtype) -> None:
    images, rows, columns = MATRICES[name]
    transposed(images, rows, columns, dtype, is_reversed=False)
    transposed(images, columns, rows, dtype, is_reversed=True)


def test_random_matrices_are_transposed() -> None:
    rng = random.Random(0)
    for dtype in BITS:
        for _ in range(60):
            rows, columns = (int(2 ** rng.uniform(0, 11)) for _ in range(2))
            images = rng.randint(1, max(1, min(40, 60_000 // (rows * columns))))
            transposed(images, rows, columns, dtype, is_reversed=rng.random() < 0.5)


@pytest.mark.parametrize("dtype", BITS)
def test_one_launch_transposes_three_tensors(dtype: torch.dtype) -> None:
    """They lie one behind the other, so that one that is written too far spoils the next."""
    sizes = ((2, 3, 225), (40, 24, 9), (1, 64, 400))
    size = dtype.itemsize
    sources, begin, all_of = [], 0, []
    for images, rows, columns in sizes:
        values = torch.randint(-99, 99, (images, rows, columns), dtype=BITS[dtype])
        count = -(-values.numel() * size // 16) * 16 // size
        all_of.append(torch.nn.functional.pad(values.flatten(), (0, count - values.numel())))
        place = (Address("x", begin), Address("y", begin))
        sources.append((values, begin // size, Transposition(*place, images, rows, columns)))
        begin += count * size
    x = between_bands(torch.cat(all_of), torch.contiguous_format, 16)
    y = between_bands(torch.full_like(x, -1), torch.contiguous_format, 16)
    launch = transpose([t for _, _, t in sources], dtype)
    run_recipe(Recipe((launch,)), {"x": x, "y": y})
    written = 0
    for values, at, _ in sources:
        found = y[at : at + values.numel()]
        assert torch.equal(found, values.transpose(1, 2).flatten())
        written += values.numel()
    assert int((y == -1).sum()) >= y.numel() - written
    assert are_bands_whole(y)


@pytest.mark.basic(1)
@pytest.mark.parametrize("compute_capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", BITS)
def test_nvrtc_compiles_the_transposition(
    dtype: torch.dtype, compute_capability: tuple[int, int]
) -> None:
    for count in (1, 2, 3):
        launch = transpose([Transposition(X, Y, 2, 3, 4)] * count, dtype)
        assert_compiles(Recipe((launch,)), compute_capability)


def test_tensors_of_up_to_2_to_the_31_elements_are_addressed() -> None:
    """Each block's numbers fit into the arguments' types."""
    for rows, columns in ((8, 2**28 - 1), (2**28 - 1, 8), (46340, 46340), (3, 715827882)):
        launch = transpose([Transposition(X, Y, 1, rows, columns)], HALF)
        assert 0 < launch.grid[0] < 2**31
        assert all(abs(a) < 2**31 for a in launch.arguments if isinstance(a, int))
        assert launch.shared_bytes <= 24 << 10


# The whole recipe

PROBLEMS = {
    "grouped": [
        plain("fprop", (2, 32, 7, 9), (48, 8, 3, 3), 1, 1, 1, 4),
        plain("fprop", (3, 64, 6, 5), (64, 16, 3, 3), 2, 1, 1, 4, dtype=BFLOAT16, bias=True),
        plain("fprop", (2, 48, 5, 6), (48, 24, 1, 1), groups=2, residual=True, activation="relu"),
        plain("fprop", (2, 32, 47), (32, 8, 3), 2, 1, 1, 4, bias=True),
        plain("dgrad", (2, 32, 9, 7), (32, 4, 3, 3), 2, 1, 1, 8),
        plain("dgrad", (1, 48, 6, 6), (48, 24, 3, 3), 1, 1, 1, 2, dtype=BFLOAT16),
    ],
    "grouped_wgrad": [
        plain("wgrad", (2, 32, 7, 9), (48, 8, 3, 3), 1, 1, 1, 4),
        plain("wgrad", (2, 48, 8, 5), (48, 24, 3, 3), 2, 1, 1, 2, dtype=BFLOAT16),
        plain("wgrad", (3, 32, 5, 5), (32, 8, 1, 1), groups=4),
        plain("wgrad", (2, 32, 7, 9), (32, 8, 3, 3), 1, 1, 1, 4, dtype=FLOAT),
    ],
    "few_channels": [
        plain("fprop", (2, 3, 15, 17), (16, 3, 7, 7), 2, 3),
        plain("fprop", (1, 3, 9, 11), (24, 3, 3, 3), 1, 1, dtype=BFLOAT16, bias=True),
        plain("fprop", (2, 4, 8, 8), (8, 4, 3, 3), 2, 1, residual=True, activation="silu"),
        plain("fprop", (2, 1, 9, 12), (16, 1, 3, 3), 1, 1),
        plain("fprop", (2, 1, 203), (64, 1, 10), 5, bias=True),
        plain("fprop", (2, 2, 101), (24, 2, 7), 2, (3, 1), dtype=BFLOAT16),
    ],
    "few_channels_wgrad": [
        plain("wgrad", (2, 3, 15, 17), (16, 3, 7, 7), 2, 3),
        plain("wgrad", (2, 1, 9, 12), (16, 1, 3, 3), 1, 1, dtype=BFLOAT16),
        plain("wgrad", (2, 1, 203), (64, 1, 10), 5),
        plain("wgrad", (2, 2, 101), (24, 2, 7), 2, (3, 1), dtype=FLOAT),
    ],
    "depthwise_wgrad": [
        plain("wgrad", (2, 24, 9, 10), (24, 1, 7, 7), 1, 3, 1, 24, dtype=FLOAT),
        plain("wgrad", (2, 16, 9, 11), (16, 1, 5, 5), 2, 2, 1, 16),
        plain("wgrad", (1, 10, 4, 6, 5), (10, 1, 3, 3, 3), 1, 1, 1, 10, dtype=BFLOAT16),
        plain("wgrad", (1, 9, 5, 7), (9, 1, 3, 3), (2, 1), 1, 1, 9, dtype=FLOAT),
        plain("wgrad", (2, 24, 40), (24, 1, 3), groups=24, dtype=FLOAT),
    ],
    "implicit_gemm_1d": [
        plain("fprop", (2, 48, 120), (48, 24, 16), 1, 8, 1, 2, bias=True),
        plain("fprop", (2, 32, 90), (16, 32, 7), 1, (3, 1), 2, residual=True),
        plain("dgrad", (2, 32, 90), (40, 32, 5), 1, 2, dtype=BFLOAT16),
        plain("dgrad", (2, 16, 64), (24, 16, 8), 4, 2),
    ],
    "implicit_gemm_1d_wgrad": [
        plain("wgrad", (2, 48, 120), (48, 24, 16), 1, 8, 1, 2),
        plain("wgrad", (2, 128, 70), (32, 64, 9), 1, 4, 2, 2, dtype=BFLOAT16),
    ],
}


def offers_of(problem: ConvProblem) -> list[str]:
    return [offer.settings for offer in RELAYOUT.offers(problem, H200)]


@pytest.mark.basic(5)
@pytest.mark.parametrize(
    ("inner", "problem"),
    [(name, problem) for name, problems in PROBLEMS.items() for problem in problems],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_result_is_that_of_the_contiguous_problem(inner: str, problem: ConvProblem) -> None:
    offered = offers_of(problem)
    assert offered
    for settings in offered:
        assert settings.startswith(f"{inner}:")
        check(RELAYOUT, problem, settings)
    check(RELAYOUT, problem, offered[0], is_reversed=True)


@pytest.mark.slow
def test_random_problems() -> None:
    rng = random.Random(1)
    checked = 0
    while checked < 15:
        problem = random_problem(rng, rng.choice(("depthwise", "grouped", "few_channels")))
        shapes = (problem.input_shape, problem.output_shape, problem.weight_shape)
        if sum(math.prod(shape) for shape in shapes) < 100_000 and offers_of(problem):
            check(RELAYOUT, problem, offers_of(problem)[0])
            checked += 1


def launches(problem: ConvProblem) -> list[tuple[str, int]]:
    """The functions, with how many tensors the transpositions move."""
    found = []
    for launch in RELAYOUT.recipe(problem, offers_of(problem)[0], H200).launches:
        tensors = dict(launch.kernel.defines).get("TENSORS", 0)
        found.append((launch.kernel.function, int(tensors)))
    return found


def test_one_launch_before_the_kernel_and_one_behind_it() -> None:
    before, kernel, behind = ("transpose", 2), ("few_channels", 0), ("transpose", 1)
    assert launches(PROBLEMS["few_channels"][0]) == [before, kernel, behind]
    assert launches(PROBLEMS["few_channels"][2]) == [("transpose", 3), kernel, behind]
    assert launches(PROBLEMS["grouped_wgrad"][0])[0] == before
    signal = plain("wgrad", (2, 1, 203), (64, 1, 10), 5)
    functions = [("transpose", 1), ("few_channels_wgrad", 0), ("sum_parts", 0)]
    assert launches(signal) == functions, "one channel lies alike in both layouts"


# What is offered


@pytest.mark.parametrize(
    "problem",
    [
        # In channels_last already.
        plain(
            *("fprop", (2, 32, 8, 8), (32, 8, 3, 3)), groups=4, memory_format=torch.channels_last
        ),
        # depthwise_planes and the kernels on tensor cores compute contiguous tensors.
        plain("fprop", (2, 24, 9, 10), (24, 1, 3, 3), 2, 1, 1, 24),
        plain("dgrad", (2, 24, 9, 10), (24, 1, 3, 3), 2, 1, 1, 24, dtype=FLOAT),
        plain("fprop", (2, 24, 9, 10), (24, 1, 7, 7), 1, 3, 1, 24),
        plain("wgrad", (2, 24, 9, 10), (24, 1, 3, 3), 1, 1, 1, 24),
        # No kernel computes them.
        plain("fprop", (2, 32, 8, 8), (32, 32, 3, 3)),
        plain("fprop", (2, 32, 8, 8), (32, 8, 3, 3), groups=4, dtype=FLOAT, allow_tf32=False),
        plain("dgrad", (2, 3, 8, 8), (24, 3, 3, 3)),
        # Hardly aligned.
        plain("wgrad", (2, 32, 7, 9), (48, 8, 3, 3), groups=4, alignment=(8, 32, 32)),
        plain("wgrad", (2, 32, 7, 9), (48, 8, 3, 3), groups=4, alignment=(32, 32, 8)),
    ],
)
def test_what_would_not_pay_is_not_offered(problem: ConvProblem) -> None:
    assert offers_of(problem) == []


def test_tensors_need_be_aligned_to_16_bytes_only() -> None:
    problem = plain("fprop", (2, 32, 7, 9), (48, 8, 3, 3), groups=4, alignment=(16, 16, 16))
    check(RELAYOUT, problem, offers_of(problem)[0])


def test_offers_are_few_and_their_texts_lead_back() -> None:
    for problem in itertools.chain(*PROBLEMS.values()):
        offers = RELAYOUT.offers(problem, H200)
        assert 1 <= len(offers) <= 3
        for offer in offers:
            text = of_implementation(RELAYOUT.name, RELAYOUT.version, offer.settings).text
            assert parse(text)[1:] == (RELAYOUT.name, RELAYOUT.version, offer.settings)
            recipe = RELAYOUT.recipe(problem, offer.settings, H200)
            assert 0 < recipe.workspace_bytes == offer.workspace_bytes
    with pytest.raises(ValueError, match="settings"):
        RELAYOUT.recipe(PROBLEMS["grouped"][0], "grouped:NONE=1", H200)
    with pytest.raises(ValueError, match="settings"):
        RELAYOUT.recipe(PROBLEMS["grouped"][0], offers_of(PROBLEMS["few_channels"][0])[0], H200)


def test_every_kind_of_random_problem_that_has_kernels_is_reached() -> None:
    rng = random.Random(0)
    names = set()
    for kind in KINDS:
        for _ in range(500):
            offered = offers_of(random_problem(rng, kind))
            names |= {settings.partition(":")[0] for settings in offered}
    assert names == set(PROBLEMS)
    assert names < {one.name for one in BUILT_IN}
