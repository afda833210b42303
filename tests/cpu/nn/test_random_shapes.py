"""The random shapes of tests/gpu/test_random_shapes_gpu.py, and the operators on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from random_shapes import DTYPES, PLACEMENTS, RandomShape, errors, operands, random_shape

import cudnn_autotune as ca

SHAPES = [random_shape(random.Random(index)) for index in range(400)]


def test_the_shapes_are_of_all_kinds() -> None:
    for kind, count in {
        "dtypes": len({shape.dtype for shape in SHAPES}) / len(DTYPES),
        "placements": len({shape.placement for shape in SHAPES}) / len(PLACEMENTS),
        "functions": len({shape.name for shape in SHAPES}) / 6,
        "layouts": len({shape.channels_last for shape in SHAPES}) / 8,
    }.items():
        assert count == 1, kind
    for kind, is_one in {
        "depthwise": lambda s: s.groups == s.input[1] > 1,
        "grouped": lambda s: 1 < s.groups < s.input[1],
        "asymmetric": lambda s: s.padding == "same" and any(k % 2 == 0 for k in s.weight[2:]),
        "strided": lambda s: max(s.stride) > 1,
        "dilated": lambda s: max(s.dilation) > 1 and max(s.weight[2:]) > 1,
        "padded output": lambda s: s.output_padding is not None and any(s.output_padding),
    }.items():
        assert sum(map(is_one, SHAPES)) >= 10, kind


@pytest.mark.parametrize("index", range(0, 400, 5))
def test_sizes_and_placements(index: int) -> None:
    shape = SHAPES[index]
    tensors = operands(shape, "cpu")
    input, weight, bias, gradient = tensors
    output = shape.call(getattr(F, shape.name), input.float(), weight.float(), None)
    assert output.shape == gradient.shape
    assert eval(repr(shape)) == shape  # what a failure prints
    assert (bias is not None) == shape.bias
    if shape.placement == "offset":
        assert input.storage_offset() == weight.storage_offset() == 1


@pytest.mark.search
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.usefixtures("on_cpu")
def test_shapes_on_the_cpu() -> None:
    """There the operators, called by the kernels of enable(), compute by ATen."""
    found = []
    with ca.enable():
        for shape in SHAPES[::4]:
            found += errors(shape, "cpu", getattr(F, shape.name))
    assert not found, "\n".join(found)


def test_a_wrong_result_is_found() -> None:
    shape = RandomShape((2, 4, 9, 8), (6, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1, "fp32", bias=True)
    assert not errors(shape, "cpu")

    def wrong(input: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        return F.conv2d(input, weight.flip(3), *others)

    assert len(errors(shape, "cpu", wrong)) == 3  # the bias's gradient is right
