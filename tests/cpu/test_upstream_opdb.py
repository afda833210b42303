"""PyTorch's own conv2d samples on the CPU: there we are PyTorch, to the bit."""

from __future__ import annotations

import pytest
import torch
from upstream import check_modules, check_op_errors, check_op_samples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_op_db_samples(dtype: torch.dtype) -> None:
    check_op_samples("cpu", dtype, exact=True)


def test_op_db_errors() -> None:
    check_op_errors("cpu")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_db(dtype: torch.dtype, training: bool) -> None:
    check_modules("cpu", dtype, training, exact=True)
