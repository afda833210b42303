"""Random models through the backend and through ``convert()``, against float64.

A result may differ from float64's by some times what PyTorch's does, eager's or Inductor's.
``RANDOM_SEED`` is the first model's seed, ``RANDOM_MODELS`` how many there are.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
from support.conv.references import relative_error
from support.models.random_models import random_model, results
from torch import Tensor

import cudnn_autotune as ca

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FIRST = int(os.environ.get("RANDOM_SEED", "0"))
COUNT = int(os.environ.get("RANDOM_MODELS", "32"))
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
ROUNDING = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
MOST_TIMES = 8
"""Times of PyTorch's error that is allowed."""


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors by name. A tensor that rounding alone keeps from zero has none."""
    return {
        name: relative_error(found[name], value) if value.double().norm() > 1e-6 else 0.0
        for name, value in expected.items()
    }


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_random_model_is_right(seed: int, cudnn_flags: Any) -> None:
    cudnn_flags(allow_tf32=False)
    ca.set_budget_ms(15)
    draw = random.Random(seed)
    model = random_model(seed).cuda()
    reference = copy.deepcopy(model).double()
    input = model.input.cuda()
    training = draw.random() < 0.6
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    autocast = dtype if dtype != torch.float32 and (training or draw.random() < 0.3) else None
    if autocast is None:
        model, input = model.to(dtype), input.to(dtype)
    if input.dim() in LAYOUTS and draw.random() < 0.6:
        input = input.contiguous(memory_format=LAYOUTS[input.dim()])
    options: dict[str, Any] = {"fuse": "always", "norms": "always", "compare": False}
    way = draw.choice([{}, options, {"freezing": not training}, None])
    eager, inductor = copy.deepcopy(model), copy.deepcopy(model)
    if way is None:
        call: Any = ca.convert(model)
    else:
        call = torch.compile(model, backend="cudnn_autotune", options=way)
    by_inductor = torch.compile(inductor)
    for inputs in (input, torch.cat([input, input])):
        before = copy.deepcopy(eager.state_dict())
        expected = results(reference, inputs.double(), training)
        found = results(model, inputs, training, call, autocast)
        by_eager = results(eager, inputs, training, autocast=autocast)
        assert found.keys() == by_eager.keys() == expected.keys()
        assert [v.dtype for v in found.values()] == [v.dtype for v in by_eager.values()]
        allowed, ours = errors(by_eager, expected), errors(found, expected)

        def beyond(allowed: dict[str, float], ours: dict[str, float]) -> list[str]:
            return [
                f"{name}: {error:.2g}, PyTorch {allowed[name]:.2g}"
                for name, error in ours.items()
                if not error <= max(MOST_TIMES * allowed[name], ROUNDING[dtype])
            ]

        if beyond(allowed, ours):  # where sums cancel, Inductor's error may be larger too
            inductor.load_state_dict(before)
            theirs = errors(results(inductor, inputs, training, by_inductor, autocast), expected)
            allowed = {name: max(error, theirs[name]) for name, error in allowed.items()}
        assert not beyond(allowed, ours), (way, dtype, autocast, model)
