"""Grouped convolutions on tensor cores (fprop and dgrad), run by the emulation of CUDA."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.conv.fused_cases import NAMES
from support.covering import covering
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.grouped_layers import LAYERS, edges, problem

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.grouped.grouped import Grouped

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
GROUPED = Grouped()
L4 = gpu_of("l4")
TYPES = {"half": torch.float16, "tf32": torch.float32}


def settings_of(what: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [offer.settings for offer in GROUPED.offers(what, gpu)]


@pytest.mark.basic(4)
@emulated
@covering(op=["fprop", "dgrad"], layer=LAYERS, dtype=TYPES)
def test_layers_of_models(op: str, layer: Any, dtype: torch.dtype) -> None:
    what = problem(op, *layer, dtype=dtype)
    found = settings_of(what)
    assert len(found) >= 2
    # Each variant takes a second to compile.
    for index, settings in enumerate(found[: 2 if layer[2] == 24 else 1]):
        WORK.matrices = WORK.conflicts = 0
        check(GROUPED, what, settings, is_reversed=index == 1)
        assert WORK.matrices > 0
        assert WORK.conflicts == 0, "what is loaded together lies in the same banks"


@pytest.mark.basic(5)
@emulated
@edges("fprop", "dgrad")
def test_edges(op: str, layer: Any) -> None:
    dtype = random.Random(repr((op, layer))).choice((torch.bfloat16, torch.float32))
    what = problem(op, *layer, dtype=dtype)
    for is_reversed in (False, True):
        check(GROUPED, what, settings_of(what)[0], is_reversed=is_reversed)


@pytest.mark.slow
@emulated
@covering(dtype=TYPES)
def test_a_block_goes_over_several_tiles(dtype: torch.dtype) -> None:
    """One multiprocessor has few blocks, so each goes over many tiles."""
    gpu = replace(H200, multiprocessors=1, shared_bytes=99 << 10)
    for op in ("fprop", "dgrad"):
        what = problem(op, (9, 17, 20), 2, 24, dtype=dtype)
        for settings in settings_of(what, gpu):
            (launch,) = GROUPED.recipe(what, settings, gpu).launches
            assert launch.grid[1] < launch.arguments[12]
            check(GROUPED, what, settings, gpu=gpu, is_reversed=op == "dgrad")


@pytest.mark.basic(2)
@emulated
@pytest.mark.parametrize("activation", NAMES)
def test_activations(activation: str) -> None:
    what = problem("fprop", (1, 7, 9), 2, 8, bias=True, residual=True, activation=activation)
    check(GROUPED, what, settings_of(what)[0])


@pytest.mark.basic(2)
@emulated
@pytest.mark.parametrize("activation", NAMES)
def test_activations_of_what_is_not_finite(activation: str) -> None:
    what = problem("fprop", (1, 7, 9), 2, 8, residual=True, activation=activation)
    tensors = random_tensors(what)
    added = tensors["residual"]
    for channel, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e4, -1e4)):
        added[0, channel, 2, 3] = value
    check_not_finite(GROUPED, what, settings_of(what)[0], tensors)


@pytest.mark.basic(2)
@emulated
@covering(epilogue=[("bias",), ("residual",), ("bias", "residual")], width=[4, 24], dtype=TYPES)
def test_bias_and_residual(epilogue: tuple[str, ...], width: int, dtype: torch.dtype) -> None:
    what = problem("fprop", (1, 7, 9), 2, width, dtype=dtype, **dict.fromkeys(epilogue, True))
    check(GROUPED, what, settings_of(what)[0])


@pytest.mark.slow
@emulated
def test_random_shapes() -> None:
    draw = random.Random(0)
    for seed in range(12):
        kernel, stride = draw.choice([(3, 1), (3, 2), (5, 2), (1, 1)])
        shape = (draw.randint(1, 5), draw.randint(3, 30), draw.randint(3, 30))
        width = draw.choice([4, 8, 24])
        what = problem(
            draw.choice(["fprop", "dgrad"]),
            shape,
            2 * draw.randint(1, 3),
            width,
            kernel,
            stride,
            draw.randint(kernel // 4, kernel),
            dtype=(torch.float16, torch.bfloat16, torch.float32)[seed % 3],
        )
        settings = draw.choice(settings_of(what))
        check(GROUPED, what, settings, is_reversed=bool(seed % 2), seed=seed)


@pytest.mark.basic(2)
@emulated
@covering(op=["fprop", "dgrad"], width=[4, 8, 12], dtype=TYPES)
def test_nan_and_infinity_stay_in_their_group(op: str, width: int, dtype: torch.dtype) -> None:
    what = problem(op, (2, 9, 11), 4, width, 3, 2, dtype=dtype)
    tensors = random_tensors(what)
    read = tensors["x" if op == "fprop" else "y"]
    read[0, 1, 2, 3] = torch.inf
    read[0, width + 1, 4, 4] = torch.nan
    read[1, -1, -1, -1] = -torch.inf
    check_not_finite(GROUPED, what, settings_of(what)[0], tensors)


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "wgrad"},
        {"dtype": torch.float32, "allow_tf32": False},
        {"dtype": torch.float64},
        {"memory_format": torch.contiguous_format},
        {"dilation": 2},
        {"stride": 3},
        {"kernel": 8},
        {"width": 2},
        {"width": 64},
        {"op": "dgrad", "width": 72, "stride": 2},
        {"width": 4, "groups": 3},
        {"groups": 1},
        {"alignment": (8, 32, 32)},
        {"alignment": (32, 8, 32)},
        {"alignment": (32, 32, 8)},
        # the filters do not fit into shared memory
        {"op": "dgrad", "stride": 2, "width": 64, "kernel": 7},
    ],
    ids=str,
)
def test_what_is_not_offered(changed: dict[str, Any]) -> None:
    fields = {"op": "fprop", "x": (2, 20, 20), "groups": 4, "width": 24, "padding": 3}
    assert settings_of(problem(**fields))
    assert not settings_of(problem(**(fields | changed)))


@covering(dtype=TYPES)
def test_offers_fit_the_gpu_and_differ(dtype: torch.dtype) -> None:
    for shared_bytes in (99 << 10, 163 << 10, 227 << 10):
        gpu = replace(L4, shared_bytes=shared_bytes)
        # Filters of wider groups in float32 do not fit into the least of these.
        wide = () if dtype is torch.float32 else (48, 56)
        for width in (4, 8, 16, 24, 32, *wide):
            what = problem("fprop", (64, 28, 28), 8, width, dtype=dtype)
            found = settings_of(what, gpu)
            assert 1 <= len(found) == len(set(found)) <= 4
            for settings in found:
                recipe = GROUPED.recipe(what, settings, gpu)
                assert recipe.workspace_bytes == 0
                assert recipe.launches[0].shared_bytes <= shared_bytes
                blocks = dict(recipe.launches[0].kernel.defines)["MIN_BLOCKS"]
                assert math.prod(recipe.launches[0].grid) <= 58 * blocks


def test_very_many_groups_are_planned_at_once() -> None:
    assert settings_of(problem("fprop", (1, 8, 8), 2**22, 4))
