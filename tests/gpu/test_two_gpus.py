"""What needs a second GPU: its random numbers, norms that ranks synchronise, a rank that dies."""

from __future__ import annotations

import pytest
import torch
from support.conv.references import TOLERANCES
from support.processes import nccl_ranks
from support.processes.gloo_ranks import Ranks
from torch import nn

from cudnn_autotune.distributed import DistributedTuningError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("how", ["compile", "convert", "enable"])
def test_the_other_gpus_random_numbers_are_left_alone(how: str) -> None:
    torch.cuda.manual_seed_all(1234)
    before = [torch.cuda.get_rng_state(index).clone() for index in range(2)]
    model = nn.Sequential(
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Conv2d(32, 16, 3, padding=1),
    ).cuda(0)
    prepared = nccl_ranks.PREPARED[how](model)
    prepared(torch.randn(4, 16, 32, 32, device="cuda:0")).sum().backward()
    # The call's own input is drawn on the first GPU.
    assert torch.equal(torch.cuda.get_rng_state(1), before[1])


@pytest.mark.parametrize("how", ["convert", "compile", "enable"])
def test_synchronised_norms_are_pytorchs(how: str) -> None:
    with Ranks(2) as two:
        for ran in two.run(nccl_ranks.synchronised, how, timeout_s=240.0):
            assert ran.error is None, ran.error
            mine, theirs = ran.value
            for kind, error in mine.items():
                assert error <= 3 * theirs[kind] + 2e-6, (kind, mine, theirs)


def test_synchronised_norms_have_pytorchs_bits_without_a_wait() -> None:
    """PyTorch's exchanges empty batches in their own dtype, which none but float32 survives."""
    cases = [
        (sizes, dtype, in_rows, 0 not in sizes or dtype is torch.float32)
        for sizes in ([3, 3], [2, 5], [0, 4], [4, 0])
        for dtype in (torch.float32, torch.bfloat16)
        for in_rows in (False, True)
    ]
    with Ranks(2) as two:
        done = two.run(nccl_ranks.synchronised_norms, cases, timeout_s=240.0)
    for ran in done:
        assert ran.error is None, ran.error
        for case, (errors, differences) in zip(cases, ran.value, strict=True):
            allowed = 3 * TOLERANCES[case[1]]
            assert all(error <= allowed for error in errors.values()), (case, errors)
            assert bool(differences) == case[-1]
            rounding = 1e-4 if 0 in case[0] else 0.0  # an empty batch is one term more
            assert all(one <= rounding for one in differences.values()), (case, differences)


def test_a_rank_that_is_killed_while_a_model_is_tuned() -> None:
    with Ranks(2) as two:
        done = two.run(nccl_ranks.tuned_where_one_dies, 1, timeout_s=120.0)
    assert done[1].died
    assert isinstance(done[0].error, DistributedTuningError)
    assert done[0].error.rank == 1
