"""``torch.nn.SyncBatchNorm`` of a converted model, among ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.norms import synchronised as cases
from support.processes.gloo_ranks import Ranks


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("sizes", [[3, 3], [1, 4], [0, 4], [4, 0]], ids=str)
def test_it_is_the_norm_of_the_joined_batch(
    two: Ranks, sizes: list[int], in_rows: bool, options: dict[str, Any]
) -> None:
    for errors in two.values(cases.trained_on_cpu, sizes, in_rows, options):
        assert all(error < 2e-6 for error in errors.values()), errors


@pytest.mark.parametrize("sizes", [[2, 0, 5, 1], [0, 0, 0, 2], [3, 0, 0, 0]], ids=str)
def test_of_more_ranks_some_have_no_values(four: Ranks, sizes: list[int]) -> None:
    for errors in four.values(cases.trained_on_cpu, sizes, True, {}):
        assert all(error < 2e-6 for error in errors.values()), errors
