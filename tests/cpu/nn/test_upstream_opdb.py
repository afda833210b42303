"""PyTorch's own samples of its convolutions on the CPU: there we are PyTorch, to the bit."""

from __future__ import annotations

import pytest
import torch
from support.conv.upstream import (
    FUNCTIONS,
    MODULES,
    WITH_ERRORS,
    check_module,
    check_op_errors,
    check_op_samples,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.basic(12)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_db_samples(name: str, dtype: torch.dtype) -> None:
    check_op_samples(name, "cpu", dtype, exact=True)


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_op_db_errors(name: str) -> None:
    check_op_errors(name, "cpu")


@pytest.mark.basic(12)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_module_db(name: str, dtype: torch.dtype, training: bool) -> None:
    check_module(name, "cpu", dtype, training, exact=True)
