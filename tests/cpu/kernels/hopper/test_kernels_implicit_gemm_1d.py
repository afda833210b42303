"""1-d convolutions by the matrix instruction of a warpgroup, run by the emulation of CUDA."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.covering import covering
from support.cuda_emulation.checks import (
    H200,
    assert_compiles,
    check,
    check_not_finite,
    random_tensors,
)

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch
from cudnn_autotune.kernels.hopper.implicit_gemm_1d import ImplicitGemm1d
from cudnn_autotune.kernels.hopper.implicit_gemm_1d_wgrad import ImplicitGemm1dWgrad

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
KERNEL, WGRAD = ImplicitGemm1d(), ImplicitGemm1dWgrad()
ONE_MULTIPROCESSOR = replace(H200, multiprocessors=1)


def problem(
    op: str,
    x: tuple[int, int],
    groups: int,
    width: int | tuple[int, int],
    kernel: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
    height: int = 1,
    **options: Any,
) -> ConvProblem:
    """A problem with an input of (images, length) and ``width`` channels a group, in and out."""
    c, k = (width, width) if isinstance(width, int) else width
    before, after = (padding, padding) if isinstance(padding, int) else padding
    options = {"dtype": torch.float16, "memory_format": torch.channels_last, **options}
    return ConvProblem(
        op,
        (x[0], groups * c, height, x[1]),
        (groups * k, c, 1, kernel),
        (1, stride),
        (0, before, 0, after),
        (1, dilation),
        groups,
        **options,
    )


LAYERS = {
    "positional, 48 a group": ("fprop dgrad wgrad", (2, 150), 2, 48, 32, 1, 16),
    "HiFi-GAN, 32 channels": ("fprop dgrad", (2, 300), 1, 32, 11, 1, 25, 5),
    "HiFi-GAN, upsampling": ("dgrad", (2, 160), 1, (32, 64), 16, 8, 4),
    "an odd number of planes": ("fprop dgrad wgrad", (1, 90), 2, 24, 7, 1, 3),
    "one plane, an even number of taps": ("fprop dgrad wgrad", (2, 70), 2, 8, 4, 1, 2),
    "one plane in, an odd number of taps": ("fprop dgrad", (1, 80), 1, (8, 40), 5, 1, 2, 3),
    "one plane out": ("fprop dgrad", (1, 80), 1, (40, 8), 3, 1, 1),
    "128 channels": ("fprop", (1, 70), 1, 128, 3, 1, 1),
    "no padding": ("fprop dgrad wgrad", (3, 41), 2, 16, 9),
    "padding as large as the kernel": ("fprop dgrad wgrad", (1, 20), 2, 16, 3, 1, 3),
    "other padding after than before": ("fprop dgrad wgrad", (1, 37), 2, 16, 6, 1, (1, 4)),
    "a signal shorter than the kernel": ("fprop dgrad wgrad", (2, 5), 2, 16, 21, 1, 10),
    "one position": ("fprop dgrad wgrad", (3, 1), 2, 16, 3, 1, 1),
    "a stride larger than the kernel": ("dgrad", (1, 61), 2, 8, 3, 5),
    "a stride that divides no length": ("dgrad", (2, 47), 1, (24, 16), 7, 3, 2),
    "positions that no output reads": ("dgrad", (1, 50), 1, 16, 3, 4),
    "rows of images": ("fprop dgrad", (2, 40), 1, 16, 3, 1, 1, 1, 3),
    "64 channels of a group": ("wgrad", (2, 80), 2, (64, 16), 5, 1, 2, 2),
    "rows of images with groups": ("wgrad", (2, 40), 2, 16, 3, 1, 1, 1, 3),
    "one tap of a group": ("fprop dgrad wgrad", (2, 66), 2, 24, 1),
}
"""The operations, (images, length), groups, channels a group, the kernel and what follows."""
CASES = [
    pytest.param(op, layer, id=f"{name}-{op}")
    for name, (of, *layer) in LAYERS.items()
    for op in of.split()
]


def family_of(what: ConvProblem) -> ImplicitGemm1d | ImplicitGemm1dWgrad:
    return WGRAD if what.op == "wgrad" else KERNEL


def settings_of(what: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [offer.settings for offer in family_of(what).offers(what, gpu)]


@pytest.mark.basic(8)
@emulated
@pytest.mark.parametrize(("op", "layer"), CASES)
def test_layers(op: str, layer: Any) -> None:
    what = problem(
        op, *layer, dtype=random.Random(repr(layer)).choice((torch.float16, torch.bfloat16))
    )
    found = settings_of(what)
    assert 1 <= len(found) == len(set(found)) <= 3
    for settings, is_reversed in zip(found, (False, True, False), strict=False):
        check(family_of(what), what, settings, is_reversed=is_reversed)


@pytest.mark.basic(4)
@emulated
@covering(op=["fprop", "dgrad"], width=[16, 24], is_reversed=[False, True])
def test_a_block_goes_over_several_tiles(op: str, width: int, is_reversed: bool) -> None:
    """One multiprocessor has few blocks; where they keep the filters, each goes over many tiles."""
    what = problem(op, (5, 500), 1, width, 7, padding=3)
    found = settings_of(what, ONE_MULTIPROCESSOR)
    assert any("KEEPS_FILTERS=1" in settings for settings in found)
    for settings in found:
        (launch,) = KERNEL.recipe(what, settings, ONE_MULTIPROCESSOR).launches
        assert isinstance(launch, KernelLaunch)
        is_kept = "KEEPS_FILTERS=1" in settings
        all_tiles = launch.arguments[-5]
        assert isinstance(all_tiles, int)
        assert (launch.grid[0] < all_tiles) == is_kept
        check(KERNEL, what, settings, gpu=ONE_MULTIPROCESSOR, is_reversed=is_reversed)


@pytest.mark.basic(2)
@emulated
@covering(
    epilogue=[("bias",), ("residual",), ("bias", "residual")],
    activation=["", "relu", "leaky_relu(0.1)", "silu", "prelu"],
    width=[16, (24, 8)],
)
def test_epilogues(epilogue: tuple[str, ...], activation: str, width: Any) -> None:
    options = dict.fromkeys(epilogue, True)
    what = problem("fprop", (2, 75), 2, width, 3, padding=1, activation=activation, **options)
    check(KERNEL, what, settings_of(what)[0])


@pytest.mark.basic(3)
@emulated
@covering(op=["fprop", "dgrad"], width=[8, 16, 24], kernel=[3, 4])
def test_nan_and_infinity_reach_no_other_outputs(op: str, width: int, kernel: int) -> None:
    what = problem(op, (2, 150), 2, width, kernel, padding=1)
    tensors = random_tensors(what)
    read = tensors["x" if op == "fprop" else "y"]
    read[0, 1, 0, 20] = torch.inf
    read[0, width + 1, 0, 60] = torch.nan
    read[1, -1, 0, -1] = -torch.inf
    read[1, 0, 0, 63] = torch.inf  # the last position of a matrix
    check_not_finite(KERNEL, what, settings_of(what)[0], tensors)


@pytest.mark.basic(2)
@emulated
@covering(width=[16, 64], kernel=[3, 9])
def test_sums_of_weights_with_nan_and_infinity(width: int, kernel: int) -> None:
    """Positions behind the last output meet zeros in products."""
    what = problem("wgrad", (2, 90), 2, width, kernel)
    tensors = random_tensors(what)
    tensors["x"][0, 3, 0, 89] = torch.inf
    tensors["x"][1, width, 0, 40] = torch.nan
    tensors["y"][0, 1, 0, 11] = -torch.inf
    for settings in settings_of(what):
        check_not_finite(WGRAD, what, settings, tensors)


@pytest.mark.slow
@emulated
def test_random_shapes() -> None:
    draw = random.Random(0)
    seed = 0
    while seed < 45:
        op, groups = draw.choice(("fprop", "dgrad", "wgrad")), draw.choice((1, 2, 3))
        stride = draw.choice((1, 2, 3, 8)) if op == "dgrad" else 1
        kernel = draw.choice((2, 3, 5, 8, 16, 19, 40))
        dilation = draw.choice((1, 1, 2, 7)) if stride == 1 else 1
        length = draw.randint(dilation * kernel, 600)
        width = (8 * draw.randint(1, 9), 8 * draw.randint(1, 9))
        padding = (draw.randint(0, kernel), draw.randint(0, kernel))
        what = problem(
            op, (draw.randint(1, 3), length), groups, width, kernel, stride, padding, dilation
        )
        gpu = draw.choice((H200, ONE_MULTIPROCESSOR))
        if found := settings_of(what, gpu):
            check(
                family_of(what),
                what,
                draw.choice(found),
                gpu=gpu,
                is_reversed=seed % 2 == 1,
                seed=seed,
            )
            seed += 1


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "wgrad", "stride": 2},
        {"op": "wgrad", "width": 20},
        {"op": "wgrad", "groups": 1},
        {"dtype": torch.float32},
        {"memory_format": torch.contiguous_format},
        {"stride": 2},
        {"op": "dgrad", "stride": 2, "dilation": 2},
        {"width": 12},
        {"width": (16, 12)},
        {"groups": 1, "width": 136},
        {"groups": 1, "kernel": 1},
        {"alignment": (8, 32, 32)},
        {"alignment": (32, 8, 32)},
        {"alignment": (32, 32, 8)},
        # the input does not fit into shared memory
        {"kernel": 500, "dilation": 100, "x": (1, 60_000)},
    ],
    ids=str,
)
def test_what_is_not_offered(changed: dict[str, Any]) -> None:
    fields = {"op": "fprop", "x": (2, 200), "groups": 2, "width": 16, "kernel": 3}
    assert settings_of(problem(**fields))
    assert not settings_of(problem(**(fields | changed)))


@pytest.mark.parametrize("name", ["a100", "l4", "t4"])
def test_other_gpus_lack_the_instruction(name: str) -> None:
    what = problem("fprop", (2, 200), 2, 16, 3)
    assert not settings_of(what, gpu_of(name))
    assert not settings_of(what, replace(H200, compute_capability=(10, 0)))


def test_kernels_compile() -> None:
    """NVRTC takes the instruction for no GPU but those of sm_90a."""
    for op in ("fprop", "dgrad", "wgrad"):
        what = problem(op, (2, 200), 2, 48, 33, padding=16)
        for settings in settings_of(what):
            assert_compiles(family_of(what).recipe(what, settings, H200), (9, 0))
