"""PyTorch's own samples of its convolutions on the GPU, through the search."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip(
    "expecttest", reason="torch.testing._internal needs expecttest (the test extra)"
)
from support.conv.upstream import (
    FUNCTIONS,
    MODULES,
    WITH_ERRORS,
    check_module,
    check_op_errors,
    check_op_samples,
)

import cudnn_autotune as ca

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def no_tf32(cudnn_flags: Callable[..., None]) -> None:
    cudnn_flags(allow_tf32=False)


@pytest.mark.parametrize("mode", ["heuristic", "sample_once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_db_samples(name: str, dtype: torch.dtype, mode: str) -> None:
    ca.set_sampling(mode)
    ca.set_benchmark_limit(4)
    check_op_samples(name, "cuda", dtype, exact=False)
    assert ca.choices(), "nothing went through the search"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_db_samples_under_enable(name: str, dtype: torch.dtype) -> None:
    ca.set_sampling("heuristic")
    check_op_samples(name, "cuda", dtype, exact=False, enabled=True)
    assert ca.choices(), "nothing went through the search"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_db_samples_of_complex_numbers(name: str, dtype: torch.dtype) -> None:
    """PyTorch composes them of convolutions of real numbers, and these are served."""
    ca.set_sampling("heuristic")
    check_op_samples(name, "cuda", dtype, exact=False)
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
    assert {choice.problem.dtype for choice in ca.choices()} <= {real}


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_op_db_errors(name: str) -> None:
    check_op_errors(name, "cuda")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_module_db(name: str, dtype: torch.dtype, training: bool) -> None:
    ca.set_sampling("heuristic")
    check_module(name, "cuda", dtype, training, exact=False)
