"""Graphs that PyTorch splits at the buckets of ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any

import pytest
from support.compile import split
from support.processes.gloo_ranks import Ranks

OURS, PLAIN = "cudnn_autotune", "inductor"
WITHOUT_NORMS = f"{OURS}, PyTorch's norms"


@pytest.mark.parametrize("options", [{}, {"memory_format": "auto"}, {"freezing": True}], ids=str)
def test_each_part_is_compared(two: Ranks, options: dict[str, Any]) -> None:
    options = {"norms": "measure", "cpp.weight_prepack": False, **options}
    for found in two.values(split.trained_and_evaluated, options):
        assert max(found.errors.values()) < 1e-4
        assert found.error_without_gradients < 1e-4
        assert found.notes == ["", "", split.WITHOUT_CONVOLUTION] * 2
        assert found.compared[0] >= {OURS, WITHOUT_NORMS}
        assert all(names >= {OURS, PLAIN} for names in found.compared[3:5])


def test_parts_serve_other_sizes(two: Ranks) -> None:
    one, several = (two.values(split.graphs_of_sizes, sizes) for sizes in ([3], [3, 4, 5]))
    assert several == one
