"""Depthwise convolutions of one dimension with few taps, run by the emulation of CUDA."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.covering import covering
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.depthwise_layers import depthwise

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise_1d import Depthwise1d

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
KERNEL = Depthwise1d()
TYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}


def settings_of(what: ConvProblem) -> list[str]:
    return [offer.settings for offer in KERNEL.offers(what, H200)]


@pytest.mark.basic(8)
@emulated
@covering(
    op=["fprop", "dgrad"],
    dtype=TYPES,
    taps_and_padding=[(2, 1), (3, 1), (4, 3), (4, 0), (5, (4, 0)), (9, 4), (7, (1, 9))],
    length=[1, 7, 8, 61, 64, 333],
)
def test_layers(op: str, dtype: torch.dtype, taps_and_padding: Any, length: int) -> None:
    """Rows begin at all places of a vector, in x and in y."""
    taps, padding = taps_and_padding
    before, after = (padding, padding) if isinstance(padding, int) else padding
    length = max(length, taps - before - after)
    what = depthwise(op, 3, (length,), (taps,), n=3, dtype=dtype, padding=(before, after))
    found = settings_of(what)
    assert len(found) == 2
    for settings, is_reversed in zip(found, (False, True), strict=True):
        check(KERNEL, what, settings, is_reversed=is_reversed)


@pytest.mark.basic(2)
@emulated
@covering(
    epilogue=[("bias",), ("residual",), ("bias", "residual")],
    activation=["", "silu", "leaky_relu(0.1)"],
    dtype=TYPES,
)
def test_epilogues(epilogue: tuple[str, ...], activation: str, dtype: torch.dtype) -> None:
    options = dict.fromkeys(epilogue, True)
    what = depthwise(
        "fprop", 5, (61,), (4,), dtype=dtype, padding=3, activation=activation, **options
    )
    check(KERNEL, what, settings_of(what)[0])


@pytest.mark.basic(2)
@emulated
@covering(op=["fprop", "dgrad"], dtype=TYPES)
def test_nan_and_infinity_reach_no_other_outputs(op: str, dtype: torch.dtype) -> None:
    what = depthwise(op, 3, (70,), (4,), dtype=dtype, padding=3)
    tensors = random_tensors(what)
    read = tensors["x" if op == "fprop" else "y"]
    read[0, 0, 0] = torch.inf
    read[0, 1, -1] = torch.nan
    read[1, 2, 33] = -torch.inf
    check_not_finite(KERNEL, what, settings_of(what)[0], tensors)


@pytest.mark.slow
@emulated
def test_random_shapes() -> None:
    draw = random.Random(0)
    for seed in range(30):
        taps = draw.randint(2, 9)
        padding = (draw.randint(0, taps + 2), draw.randint(0, taps + 2))
        what = depthwise(
            draw.choice(("fprop", "dgrad")),
            draw.randint(2, 20),
            (draw.randint(taps, 400),),
            (taps,),
            n=draw.randint(1, 4),
            dtype=draw.choice(list(TYPES.values())),
            padding=padding,
            alignment=(16, draw.choice((2, 4, 16)) * 2, 16),
        )
        check(KERNEL, what, settings_of(what)[0], is_reversed=seed % 2 == 1, seed=seed)


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "wgrad"},
        {"taps": 1},
        {"taps": 10},
        {"stride": 2},
        {"dilation": 2},
        {"multiplier": 2},
        {"alignment": (8, 32, 32)},
        {"alignment": (32, 32, 8)},
    ],
    ids=str,
)
def test_what_is_not_offered(changed: dict[str, Any]) -> None:
    def problem(op: str = "fprop", taps: int = 4, **options: Any) -> ConvProblem:
        return depthwise(op, 8, (50,), (taps,), padding=3, **options)

    assert settings_of(problem())
    assert not settings_of(problem(**changed))
    assert not settings_of(depthwise("fprop", 8, (9, 9), (3, 3), padding=1))
