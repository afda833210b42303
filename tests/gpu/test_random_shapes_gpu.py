"""Random convolutions of all kinds against float64.

``RANDOM_SHAPES`` is how many shapes the test of the heuristics' plans takes; each has four results,
by three problems. ``RANDOM_SEED`` chooses them. A failure prints the shape; to repeat it, call
``random_shapes.errors`` with it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from support.conv.random_shapes import errors, random_shape

import cudnn_autotune as ca

pytestmark = pytest.mark.long

COUNT = int(os.environ.get("RANDOM_SHAPES", "700"))
SEED = os.environ.get("RANDOM_SEED", "0")
MOST_SECONDS = 90.0


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("mode", "count"), [("heuristic", COUNT), ("race", max(COUNT // 20, 1))])
def test_random_shapes(mode: str, count: int, cudnn_flags: Callable[..., None]) -> None:
    """Every second shape through PyTorch's own function, under enable()."""
    ca.set_sampling(mode)
    ca.set_benchmark_limit(8)
    found, problems, start = [], 0, time.monotonic()
    for index in range(count):
        shape = random_shape(random.Random(f"{SEED} {mode} {index}"))
        cudnn_flags(allow_tf32=shape.dtype == "tf32")
        if index % 2:
            found += errors(shape, "cuda")
        else:
            with ca.enable():
                found += errors(shape, "cuda", getattr(F, shape.name))
        if index % 50 == 49:  # plans and choices of so many shapes would fill the memory
            problems += len(ca.choices())
            ca.forget()
        if time.monotonic() - start > MOST_SECONDS and "RANDOM_SHAPES" not in os.environ:
            break
    problems += len(ca.choices())
    print(f"{mode}: {index + 1} shapes, {problems} problems in {time.monotonic() - start:.0f} s")
    assert not found, "\n".join(found)
    assert problems > 2 * index, "most shapes are cuDNN's"
