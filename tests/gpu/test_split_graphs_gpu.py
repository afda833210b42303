"""A graph that PyTorch splits at the buckets of ``DistributedDataParallel``, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.compile import split


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The process is a group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"memory_format": "auto"}, {"freezing": True}], ids=str)
def test_each_part_is_compared(
    alone: None, options: dict[str, Any], cudnn_flags: Callable[..., None]
) -> None:
    cudnn_flags(allow_tf32=False)  # its rounding turns ReLUs off and on: gradients differ by 1 %
    found = split.trained_and_evaluated(options, "cuda")
    assert max(found.errors.values()) < 1e-2
    assert found.error_without_gradients < 1e-2
    assert not [note for note in found.notes if "not compared" in note]
    assert all(found.compared[i] for i in (0, 3, 4))
