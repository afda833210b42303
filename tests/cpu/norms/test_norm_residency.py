"""Norms beside kernels of other streams, on the emulation of CUDA: only some blocks are there at a
time, and start in any order. Results have the bits of a GPU that a launch has for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.covering import covering
from support.norms.cases import Norm, norm
from support.norms.launches import SMALL, TOGETHER, Schedule, by_kernels, group_norm_by_kernels
from torch import Tensor

from cudnn_autotune.norms.plan import Form, NormPlan

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

BOTH = (False, True)
KEPT: tuple[Form, ...] = ("kept", "half kept")


def results(given: Norm, form: Form, schedule: Schedule, **options: Any) -> dict[str, Tensor]:
    """All results of a norm, with running statistics that each launch moves."""
    channels = given.input.shape[1]
    running = [torch.full((channels,), float(value)) for value in (3, 5)]
    found = by_kernels(given, SMALL, form, running=running, schedule=schedule, **options)
    named = {name: value for name, value in vars(found).items() if value is not None}
    return {**named, "running_mean": running[0], "running_var": running[1]}


def compare(given: Norm, form: Form, schedule: Schedule, **options: Any) -> None:
    wanted = results(given, form, replace(TOGETHER, launches=schedule.launches), **options)
    found = results(given, form, schedule, **options)
    for name, values in wanted.items():
        assert not values.isnan().any(), name
        assert torch.equal(found[name], values), name


@pytest.mark.basic(3)
@covering(
    form=KEPT,
    resident=[1, 2, 4],
    dtype=[torch.float32, torch.float16],
    residual=BOTH,
    is_reversed=BOTH,
)
def test_few_blocks_are_there(
    form: Form, resident: int, dtype: torch.dtype, residual: bool, is_reversed: bool
) -> None:
    given = norm((5, 64, 16, 20), dtype, residual=residual, channels_last=True)
    schedule = Schedule(resident, seed=resident + 10 * is_reversed, launches=2)
    compare(given, form, schedule, is_reversed=is_reversed)


@pytest.mark.basic(2)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_blocks(seed: int) -> None:
    """With as many blocks as parts, and with fewer, which take turns at random barriers."""
    activation = ("relu", "silu")[seed % 2]
    given = norm((6, 64, 16, 20), activation=activation, residual=True, channels_last=True)
    for resident in (2, 3, 5):
        compare(given, KEPT[seed // 2], Schedule(resident, seed=1 + seed, launches=3))


@pytest.mark.basic(2)
@covering(form=KEPT, resident=[1, 3], channels_last=BOTH)
def test_several_slabs_of_each_block(form: Form, resident: int, channels_last: bool) -> None:
    """A block computes the parts that it has adopted of all slabs that it works on."""
    tight = replace(SMALL, shared_bytes=(120 if form == "kept" else 68) << 10)
    given = norm((6, 144, 16, 20), channels_last=channels_last, residual=True)
    plans: list[NormPlan] = []
    by_kernels(given, tight, form, plans=plans)
    assert any(plan.launches[0].blocks < plan.slabs * plan.parts for plan in plans)
    wanted = by_kernels(given, tight, form)
    found = by_kernels(given, tight, form, schedule=Schedule(resident, seed=resident))
    for name, values in vars(wanted).items():
        assert torch.equal(getattr(found, name), values), name


@pytest.mark.basic(2)
@pytest.mark.parametrize("resident", [1, 2, 4])
def test_masks(resident: int) -> None:
    given = norm((5, 64, 16, 20), torch.bfloat16, residual=True, channels_last=True)
    compare(given, "kept", Schedule(resident, seed=resident))


@pytest.mark.basic(2)
@pytest.mark.parametrize("resident", [1, 2, 4])
def test_group_norms(resident: int) -> None:
    input = torch.randn((1, 8, 64, 64), generator=torch.Generator().manual_seed(0))
    weight, bias = torch.rand(8), torch.rand(8)
    schedule = Schedule(resident, seed=resident, launches=2)
    wanted = group_norm_by_kernels(input, 2, weight, bias, SMALL, "kept")
    found = group_norm_by_kernels(input, 2, weight, bias, SMALL, "kept", schedule=schedule)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_two_passes_wait_for_no_block() -> None:
    given = norm((5, 64, 16, 20), residual=True, channels_last=True)
    compare(given, "two passes", Schedule(1, seed=1, launches=1))
