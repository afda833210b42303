"""The random shapes of tests/gpu/test_random_shapes_gpu.py, and the operators on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from support.conv.random_shapes import RandomShape, errors, random_shape

import cudnn_autotune as ca

SHAPES = [random_shape(random.Random(index)) for index in range(400)]


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
