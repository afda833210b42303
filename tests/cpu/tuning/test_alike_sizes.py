"""Which sizes are alike: the rule by itself, on GPUs of property files."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.tuning.alike_sizes import distance, doubt, is_alike

LAST, FIRST = torch.channels_last, torch.contiguous_format
GPUS = ("t4", "l4", "a100", "h100", "h200")
# Input channels, output channels, edge of the filter, groups.
LAYERS = [(64, 64, 3, 1), (3, 64, 7, 1), (128, 128, 3, 32), (96, 96, 7, 96), (256, 64, 1, 1)]


def sized(
    *sizes: int,
    layer: tuple[int, int, int, int] = LAYERS[0],
    layout: torch.memory_format = LAST,
    **changes: Any,
) -> ca.ConvProblem:
    channels, filters, edge, groups = layer
    taps = (edge,) * (len(sizes) - 1)
    values: dict[str, Any] = {"op": "fprop", "dtype": torch.float16, "padding": edge // 2}
    return ca.ConvProblem(
        input_shape=(sizes[0], channels, *sizes[1:]),
        weight_shape=(filters, channels // groups, *taps),
        groups=groups,
        memory_format=layout,
        **(values | changes),
    )


@pytest.mark.parametrize(
    ("size", "is_alike_last", "is_alike_first"),
    [
        ((8, 64, 80), True, True),
        ((8, 64, 76), True, False),  # rows of 76 halves begin at multiples of 8 bytes
        ((8, 65, 72), True, True),
        ((8, 66, 71), True, False),
        ((8, 65, 88), True, True),
        ((4, 64, 72), False, False),
        ((15, 64, 72), True, True),
        ((12, 92, 72), False, False),  # twice as many pixels, though each size is near
    ],
    ids=str,
)
def test_what_is_alike(size: tuple[int, ...], is_alike_last: bool, is_alike_first: bool) -> None:
    for layout, expected in ((LAST, is_alike_last), (FIRST, is_alike_first)):
        one, other = sized(*size, layout=layout), sized(8, 64, 72, layout=layout)
        assert is_alike(one, other) is is_alike(other, one) is expected


def test_of_a_matrix_product_the_image_is_a_row() -> None:
    layer = (256, 64, 1, 1)
    here = sized(8, 8, 14, layer=layer, layout=FIRST)
    assert not is_alike(here, sized(8, 9, 14, layer=layer, layout=FIRST))
    assert is_alike(here, sized(8, 12, 14, layer=layer, layout=FIRST))


def test_the_vector_depends_on_the_type() -> None:
    for dtype, expected in ((torch.float16, False), (torch.float32, True)):
        problems = [sized(8, 64, width, layout=FIRST, dtype=dtype) for width in (72, 76)]
        assert is_alike(*problems) is expected


def test_an_input_smaller_than_the_filter_is_another_class() -> None:
    layer = (96, 96, 7, 96)
    assert not is_alike(sized(8, 6, 64, layer=layer), sized(8, 7, 64, layer=layer))
    assert is_alike(sized(8, 8, 64, layer=layer), sized(8, 7, 64, layer=layer))


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    one, other = (sized(8, *(width,) * dims, layout=FIRST) for width in (48, 56))
    assert is_alike(one, other)
    assert not is_alike(one, sized(8, *(49,) * dims, layout=FIRST))
    for name in GPUS:
        assert doubt(one, other, gpu_of(name), 0.1) > 0


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_the_doubt_grows_with_the_distance(name: str, op: str) -> None:
    gpu, here = gpu_of(name), sized(8, 256, 256, op=op)
    assert doubt(here, here, gpu, 1.0) == 0
    near, far = (doubt(sized(8, 256, w, op=op), here, gpu, 1.0) for w in (264, 400))
    assert 0 < near < 0.05
    assert near < far < 0.25


def test_a_short_call_is_in_doubt() -> None:
    """Of two kernels one may take a fixed time only, the other one none."""
    here, there = sized(8, 256, 256), sized(8, 256, 320)
    doubts = [doubt(there, here, gpu_of("h100"), ms) for ms in (0.002, 0.02, 0.2)]
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[0] - doubts[2] == pytest.approx(math.log(1.25), rel=0.05)


def test_the_last_wave_is_in_doubt() -> None:
    gpu, layer = gpu_of("h100"), (128, 128, 3, 1)
    full = gpu.multiprocessors * 128  # pixels of a wave of the middle tile
    here, there = (sized(1, 1, full + more, layer=layer, layout=FIRST) for more in (0, 128))
    assert doubt(there, here, gpu, 10.0) >= math.log(1.9)
    wgrad = [sized(1, 1, full + more, layer=layer, layout=FIRST, op="wgrad") for more in (0, 128)]
    assert doubt(wgrad[1], wgrad[0], gpu, 10.0) < 0.01
    many = [sized(64, 8, full + more, layer=layer, layout=FIRST) for more in (0, 128)]
    assert doubt(many[1], many[0], gpu, 10.0) < 0.01


def test_tiles_of_images_are_in_doubt_where_images_are_small() -> None:
    gpu, layer = gpu_of("h100"), (256, 256, 7, 256)
    here, there = sized(256, 32, 32, layer=layer), sized(256, 33, 33, layer=layer)
    assert doubt(there, here, gpu, 1.0) < 0.1
    assert doubt(there, here, gpu, 1.0, has_image_tiles=True) > math.log(2)
    assert distance(here, there) < 0.1
