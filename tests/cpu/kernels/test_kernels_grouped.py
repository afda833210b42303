"""What is special to the grouped kernels, in the emulation of CUDA; ``test_battery.py`` has what
they have in common with others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.conv.fused_cases import NAMES
from support.covering import covering
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.grouped import GROUPED, WGRAD, grouped

from cudnn_autotune.engines.offers import gpu_of

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
TYPES = {"half": torch.float16, "tf32": torch.float32}


@pytest.mark.basic(2)
@emulated
@pytest.mark.parametrize("activation", NAMES)
def test_activations_of_what_is_not_finite(activation: str) -> None:
    problem = grouped("fprop", (1, 7, 9), 2, 8, residual=True, activation=activation)
    tensors = random_tensors(problem)
    added = tensors["residual"]
    for channel, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e4, -1e4)):
        added[0, channel, 2, 3] = value
    check_not_finite(GROUPED.kernel, problem, GROUPED.settings_of(problem)[0], tensors)


@covering(dtype=TYPES)
def test_offers_fit_the_gpu_and_differ(dtype: torch.dtype) -> None:
    for shared_bytes in (99 << 10, 163 << 10, 227 << 10):
        gpu = replace(gpu_of("l4"), shared_bytes=shared_bytes)
        # Filters of wider groups in float32 do not fit into the least of these.
        wide = () if dtype is torch.float32 else (48, 56)
        for width in (4, 8, 16, 24, 32, *wide):
            problem = grouped("fprop", (64, 28, 28), 8, width, dtype=dtype)
            found = GROUPED.settings_of(problem, gpu)
            assert 1 <= len(found) == len(set(found)) <= 4
            for settings in found:
                (launch,) = GROUPED.kernel.recipe(problem, settings, gpu).launches
                assert launch.shared_bytes <= shared_bytes
                blocks = dict(launch.kernel.defines)["MIN_BLOCKS"]
                assert math.prod(launch.grid) <= 58 * blocks


def test_very_many_groups_are_planned_at_once() -> None:
    assert GROUPED.settings_of(grouped("fprop", (1, 8, 8), 2**22, 4))


# The gradient of the weight


@pytest.mark.basic(1)
@emulated
@covering(stride=[1, 2], dtype=TYPES)
def test_what_is_loaded_together_lies_in_different_banks(stride: int, dtype: torch.dtype) -> None:
    """But for some where zeros stand in for pixels beside the output."""
    for width in (32, 30):
        problem = grouped("wgrad", (2, 13, width * stride), 2, 24, 3, stride, dtype=dtype)
        WORK.matrices = WORK.conflicts = 0
        check(WGRAD.kernel, problem, WGRAD.settings_of(problem)[0])
        may_conflict = dtype != torch.float32 and width % 8 > 0
        assert WORK.conflicts <= may_conflict * WORK.matrices / 8
        assert WORK.matrices > 0


@emulated
def test_what_lies_beside_the_output_makes_no_nan() -> None:
    """There dy is zero, but x may be infinite."""
    problem = grouped("wgrad", (2, 9, 11), 4, 4, 3, 2, 0)
    tensors = random_tensors(problem)
    tensors["x"][0, 1, 8, 10] = torch.inf
    tensors["y"][0, 11, 1, 1] = torch.nan
    check_not_finite(WGRAD.kernel, problem, WGRAD.settings_of(problem)[0], tensors)


def test_the_workspace_holds_the_sums_of_all_blocks() -> None:
    problem = grouped("wgrad", (64, 14, 14), 24, 24)
    for offer in WGRAD.kernel.offers(problem, H200):
        multiply, add = WGRAD.kernel.recipe(problem, offer.settings, H200).launches
        assert offer.workspace_bytes == multiply.grid[1] * 576 * 24 * 9 * 4
        assert add.arguments[2:] == (multiply.grid[1], 576 * 24 * 9)
        assert offer.numerical_notes == ("TENSOR_CORE",)
