"""Convolutions with few output channels, run by the emulation of CUDA."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import cuda_emulation
from support.conv.references import expected, relative_error, tolerance
from support.covering import covering
from support.cuda_emulation import EmulationError, run_recipe
from support.cuda_emulation.checks import (
    H200,
    assert_compiles,
    check,
    check_not_finite,
    random_tensors,
)

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.hopper.few_filters import FewFilters

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
KERNEL = FewFilters()
ONE_MULTIPROCESSOR = replace(H200, multiprocessors=1)


def problem(
    op: str,
    x: tuple[int, ...],
    channels: tuple[int, int],
    kernel: int | tuple[int, ...] = 3,
    padding: Any = 1,
    dilation: Any = 1,
    **options: Any,
) -> ConvProblem:
    """A problem whose ``channels`` are those that the kernel reads, and those that it writes.

    Args:
        x: images, and the depth (in 3-d), height and width of the input.
    """
    dims = len(x) - 1
    c, k = channels if op == "fprop" else reversed(channels)
    options = {
        "stride": 1,
        "dtype": torch.float16,
        "memory_format": CHANNELS_LAST[dims],
        **options,
    }
    return ConvProblem(
        op,
        (x[0], c, *x[1:]),
        (k, c, *((kernel,) * dims if isinstance(kernel, int) else kernel)),
        padding=padding,
        dilation=dilation,
        **options,
    )


def settings_of(what: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [offer.settings for offer in KERNEL.offers(what, gpu)]


LAYERS = {
    "DenseNet's, 14 x 14": ((1, 14, 14), (128, 32)),
    "DenseNet's, 7 x 7, whose rows share their padding": ((3, 7, 7), (128, 32)),
    "rows of several tiles": ((1, 9, 75), (32, 32)),
    "a row as wide as the window": ((1, 5, 62), (16, 16)),
    "ESRGAN's": ((1, 11, 23), (96, 32)),
    "a stage of ten planes": ((1, 8, 9), (160, 16)),
    "8 filters": ((2, 10, 33), (64, 8)),
    "24 filters": ((2, 10, 17), (48, 24)),
    "64 filters": ((1, 9, 20), (32, 64)),
    "filters of 5 x 5": ((1, 13, 19), (32, 16), 5, 2),
    "filters of 9 columns": ((1, 6, 30), (16, 8), (2, 9), (1, 4)),
    "filters of 2 x 4": ((1, 7, 21), (16, 8), (2, 4), 1),
    "no padding": ((2, 12, 12), (32, 16), 3, 0),
    "padding larger than the kernel": ((1, 6, 6), (16, 8), 3, 4),
    "other padding after than before": ((1, 9, 8), (16, 16), 3, (0, 2, 2, 1)),
    "a dilation of rows": ((1, 12, 12), (16, 16), 3, (2, 1), (2, 1)),
    "an image smaller than the filters": ((2, 2, 1), (32, 8)),
    "one pixel": ((3, 1, 1), (16, 8)),
    "V-Net's": ((1, 6, 9, 15), (16, 16), 5, 2),
    "nnU-Net's, several chunks and tiles": ((2, 3, 9, 20), (96, 32)),
    "depths without padding": ((1, 5, 6, 8), (32, 16), 3, (0, 1, 1)),
    "causal in depth": ((1, 4, 7, 7), (16, 24), 3, (2, 1, 1, 0, 1, 1)),
    "one depth of filters": ((2, 3, 8, 16), (32, 8), (1, 3, 3), (0, 1, 1)),
    "one row of filters": ((1, 5, 6, 18), (16, 16), (3, 1, 3), (1, 0, 1)),
    "a dilation of depths and rows": ((1, 9, 8, 10), (16, 8), 3, (2, 3, 1), (2, 3, 1)),
    "an image of one depth": ((2, 1, 5, 5), (16, 8)),
}
"""The images, channels in and out, and what follows."""
LAST_LAYERS = {
    "3 filters": ((2, 11, 21), (64, 3)),
    "one filter": ((1, 9, 40), (32, 1)),
    "2 filters of 5 x 5": ((1, 14, 9), (16, 2), 5, 2),
    "7 filters of a volume": ((1, 4, 7, 7), (32, 7)),
    "30 filters": ((1, 8, 33), (48, 30)),
}
"""The same of layers with other numbers of filters, which are not for dgrad."""
CASES = [
    pytest.param(op, layer, id=f"{name}-{op}")
    for op, layers in (("fprop", LAYERS | LAST_LAYERS), ("dgrad", LAYERS))
    for name, layer in layers.items()
]


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
        check(KERNEL, what, settings, is_reversed=is_reversed)


@pytest.mark.basic(2)
@emulated
@covering(
    op=["fprop", "dgrad"], x=[(3, 19, 14), (3, 19, 40), (2, 3, 9, 30)], is_reversed=[False, True]
)
def test_a_block_goes_over_several_tiles(op: str, x: Any, is_reversed: bool) -> None:
    """One multiprocessor has few blocks, each of which goes over tiles of several images."""
    what = problem(op, x, (32, 16))
    for settings in settings_of(what, ONE_MULTIPROCESSOR):
        (launch,) = KERNEL.recipe(what, settings, ONE_MULTIPROCESSOR).launches
        assert isinstance(launch, KernelLaunch)
        all_tiles, tiles, _ = launch.arguments[-3:]
        assert isinstance(all_tiles, int)
        assert isinstance(tiles, int)
        assert 1 < tiles <= all_tiles
        assert launch.grid[0] * tiles >= all_tiles
        check(KERNEL, what, settings, gpu=ONE_MULTIPROCESSOR, is_reversed=is_reversed)


@pytest.mark.basic(2)
@emulated
@covering(
    epilogue=[("bias",), ("residual",), ("bias", "residual")],
    activation=["", "relu", "leaky_relu(0.1)", "silu", "prelu"],
    channels=[(16, 16), (64, 24), (32, 3)],
)
def test_epilogues(epilogue: tuple[str, ...], activation: str, channels: Any) -> None:
    if channels[1] % 8:
        epilogue = ("bias",)
    options = dict.fromkeys(epilogue, True)
    what = problem("fprop", (2, 7, 18), channels, activation=activation, **options)
    check(KERNEL, what, settings_of(what)[0])


@pytest.mark.basic(3)
@emulated
@covering(
    pixel_strides=[(96, 32), (64, 48), (128, 96)],
    residual=[False, True],
    size=[(7, 7), (9, 33), (3, 5, 9)],
)
def test_slices(pixel_strides: tuple[int, int], residual: bool, size: tuple[int, ...]) -> None:
    """The input and the output are slices of the channels of larger tensors."""
    what = problem(
        "fprop",
        (2, *size),
        (64, 32),
        pixel_strides=pixel_strides,
        bias=True,
        residual=residual,
        activation="relu",
    )
    tensors = random_tensors(replace(what, pixel_strides=None))
    read = torch.full((2, pixel_strides[0], *size), torch.nan, dtype=torch.float16)
    read = read.contiguous(memory_format=what.memory_format)
    read[:, pixel_strides[0] - 64 :] = tensors["x"]
    whole = torch.full((2, pixel_strides[1], *size), 7.0, dtype=torch.float16)
    whole = whole.contiguous(memory_format=what.memory_format)
    first = pixel_strides[1] - 32
    before = whole.clone()
    for settings in settings_of(what):
        whole.copy_(before)
        buffers = {**tensors, "x": read[:, pixel_strides[0] - 64 :], "y": whole[:, first:]}
        run_recipe(KERNEL.recipe(what, settings, H200), buffers)
        assert torch.equal(whole[:, :first], before[:, :first])
        error = relative_error(whole[:, first:], expected(what, tensors))
        assert error <= tolerance(what.dtype, what.allow_tf32, what.activation)


def test_slices_are_offered() -> None:
    what = problem("fprop", (2, 14, 14), (64, 32), pixel_strides=(96, 32))
    assert {one.id.name for one in offers_of(what, H200)} == {"few_filters"}


@pytest.mark.basic(3)
@emulated
@covering(op=["fprop", "dgrad"], x=[(2, 9, 7), (2, 9, 14), (2, 9, 40), (2, 4, 9, 7)], kernel=[3, 4])
def test_nan_and_infinity_reach_no_other_outputs(op: str, x: Any, kernel: int) -> None:
    what = problem(op, x, (32, 16), kernel)
    tensors = random_tensors(what)
    read = (
        tensors["x" if op == "fprop" else "y"].permute(0, *range(2, len(x) + 1), 1).flatten(1, -3)
    )
    read[0, 0, 0, 1] = torch.inf
    read[0, 3, -1, 20] = torch.nan
    read[1, -1, -1, -1] = -torch.inf
    for settings in settings_of(what):
        check_not_finite(KERNEL, what, settings, {k: v.clone() for k, v in tensors.items()})


FAULTS = {
    "one group of copies less": ("copies_arrived<STAGES - 2>();", "copies_arrived<STAGES - 1>();"),
    "no barrier of the block": ("    __syncthreads();\n", ""),
    "no barrier of the warpgroup": ("  sync_warpgroup();\n", ""),
    "products that nobody waits for": ("    products_done<0>();\n", ""),
    "a copy to the stage that is read": ("    multiply(sums,", "copy_next_stage(); multiply(sums,"),
    "a stage that is read too long": (
        "    products_done<0>();\n    if (i % kTileStages == kTileStages - 1) {",
        "    if (i % kTileStages == kTileStages - 1) {\n      products_done<0>();",
    ),
}
"""Faults that a GPU would show in some runs only, as replacements in the kernel's source."""


@pytest.mark.basic(6)
@emulated
@pytest.mark.parametrize(("whole", "broken"), FAULTS.values(), ids=FAULTS)
def test_the_emulation_sees_what_is_missing(whole: str, broken: str) -> None:
    what = problem("fprop", (2, 9, 30), (96, 16))
    wrong = 0
    for settings, is_reversed in product(settings_of(what, ONE_MULTIPROCESSOR), (False, True)):
        (launch,) = KERNEL.recipe(what, settings, ONE_MULTIPROCESSOR).launches
        assert isinstance(launch, KernelLaunch)
        assert isinstance(launch.kernel, Kernel)
        assert launch.kernel.source.count(whole) == 1
        kernel = replace(launch.kernel, source=launch.kernel.source.replace(whole, broken))
        tensors = random_tensors(what)
        try:
            recipe = Recipe((replace(launch, kernel=kernel),))
            run_recipe(recipe, tensors, is_reversed=is_reversed)
        except EmulationError:
            wrong += 1
            continue
        error = relative_error(tensors["y"], expected(what, tensors))
        wrong += not error <= tolerance(what.dtype, True)
    assert wrong


@pytest.mark.slow
@emulated
def test_random_shapes() -> None:
    draw = random.Random(0)
    seed = 0
    while seed < 60:
        has_depth = draw.random() < 0.4
        kernel = (draw.choice((2, 3, 3, 4, 6)), draw.choice((2, 3, 3, 5, 7)))
        dilation = (draw.choice((1, 1, 2)), 1)
        size = (draw.randint(1, 30), draw.randint(1, 90))
        if has_depth:
            kernel, dilation = (
                (draw.choice((1, 2, 3, 5)), *kernel),
                (draw.choice((1, 2)), *dilation),
            )
            size = (draw.randint(1, 7), size[0] // 2 + 1, size[1] // 2 + 1)
        try:
            what = problem(
                draw.choice(("fprop", "dgrad")),
                (draw.randint(1, 3), *size),
                (16 * draw.randint(1, 7), 8 * draw.randint(1, 5)),
                kernel,
                tuple(draw.randint(0, k) for k in (*kernel, *kernel)),
                dilation,
                dtype=draw.choice((torch.float16, torch.bfloat16)),
            )
        except ValueError:  # the filters do not fit into the image
            continue
        gpu = draw.choice((H200, ONE_MULTIPROCESSOR))
        if found := settings_of(what, gpu):
            settings, is_reversed = draw.choice(found), seed % 2 == 1
            check(KERNEL, what, settings, gpu=gpu, is_reversed=is_reversed, seed=seed)
            seed += 1


@emulated
def test_rows_far_above_a_wide_image() -> None:
    """Times the image's width, the first row of the window does not fit into 32 bits."""
    width, above = 11_000_000, 200
    what = problem("fprop", (1, 1, width), (16, 8), (2, 3), (above, 1, 0, 1), (above, 1))
    (launch,) = KERNEL.recipe(what, settings_of(what)[0], H200).launches
    assert isinstance(launch, KernelLaunch)
    launch = replace(
        launch, grid=(1, 1, 1), arguments=(*launch.arguments[:-2], 1, launch.arguments[-1])
    )
    x, y = (torch.zeros(1, 1, width, n, dtype=what.dtype).permute(0, 3, 1, 2) for n in (16, 8))
    x[..., :100] = torch.randn(100)
    w = torch.randn(8, 16, 2, 3).to(what.dtype).contiguous(memory_format=torch.channels_last)
    run_recipe(Recipe((launch,)), {"x": x, "w": w, "y": y})
    seen = F.pad(x[..., :100], (1, 0, above, 0)).double()
    right = F.conv2d(seen, w.double(), dilation=(above, 1))
    assert relative_error(y[..., :10], right[..., :10]) <= tolerance(what.dtype, True)


def test_kernels_of_many_products_have_fewer_warps() -> None:
    """Four warpgroups leave a thread 128 registers, which were too few for these."""
    for channels, kernel in (((80, 32), 3), ((64, 24), 5), ((64, 16), 6)):
        found = settings_of(problem("fprop", (64, 28, 28), channels, kernel, 1))
        assert found
        assert not any("WARPGROUPS=4" in settings for settings in found)


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "wgrad"},
        {"dtype": torch.float32},
        {"memory_format": torch.contiguous_format},
        {"stride": 2},
        {"dilation": 2},
        {"groups": 2, "channels": (64, 32)},
        {"channels": (24, 32)},
        {"op": "dgrad", "channels": (32, 12)},
        {"channels": (32, 12), "residual": True},
        {"channels": (32, 30), "kernel": 9},
        {"channels": (32, 72)},
        {"kernel": (1, 3)},
        {"kernel": (3, 1)},
        {"kernel": (2, 10)},
        {"kernel": 7, "channels": (32, 40)},
        {"x": (2, 9, 9, 9), "kernel": (1, 1, 3), "padding": (0, 0, 1)},
        # the filters do not fit into shared memory
        {"channels": (2048, 32)},
        {"x": (2, 9, 9, 9), "channels": (128, 64)},
        {"alignment": (8, 32, 32)},
        {"alignment": (32, 8, 32)},
        {"alignment": (32, 32, 8)},
    ],
    ids=str,
)
def test_what_is_not_offered(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"op": "fprop", "x": (2, 20, 20), "channels": (32, 32)}
    assert settings_of(problem(**fields))
    fields |= changed
    if groups := fields.pop("groups", None):
        c, k = fields["channels"]
        what = ConvProblem(
            "fprop",
            (2, c, 20, 20),
            (k, c // groups, 3, 3),
            groups=groups,
            dtype=torch.float16,
            memory_format=torch.channels_last,
        )
        assert not settings_of(what)
    else:
        assert not settings_of(problem(**fields))


@pytest.mark.parametrize("name", ["a100", "l4", "t4"])
def test_other_gpus_lack_the_instruction(name: str) -> None:
    what = problem("fprop", (2, 20, 20), (32, 32))
    assert not settings_of(what, gpu_of(name))
    assert not settings_of(what, replace(H200, compute_capability=(10, 0)))


def test_kernels_compile() -> None:
    """NVRTC takes the instruction for no GPU but those of sm_90a."""
    for op, x in product(("fprop", "dgrad"), ((64, 56, 56), (2, 32, 32, 32))):
        what = problem(op, x, (64, 32))
        for settings in settings_of(what):
            assert_compiles(KERNEL.recipe(what, settings, H200), (9, 0))
