"""PyTorch's own conv2d samples on the GPU, through the search."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip(
    "expecttest", reason="torch.testing._internal needs expecttest (the test extra)"
)
from upstream import check_modules, check_op_errors, check_op_samples

import cudnn_autotune as ca

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def no_tf32(cudnn_flags: Callable[..., None]) -> None:
    cudnn_flags(allow_tf32=False)


@pytest.mark.parametrize("mode", ["heuristic", "sample_once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_db_samples(dtype: torch.dtype, mode: str) -> None:
    ca.set_sampling(mode)
    ca.set_benchmark_limit(4)
    check_op_samples("cuda", dtype, exact=False)
    assert ca.choices(), "nothing went through the search"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_op_db_samples_that_cudnn_lacks(dtype: torch.dtype) -> None:
    check_op_samples("cuda", dtype, exact=False)
    assert not ca.choices()


def test_op_db_errors() -> None:
    check_op_errors("cuda")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_db(dtype: torch.dtype, training: bool) -> None:
    ca.set_sampling("heuristic")
    check_modules("cuda", dtype, training, exact=False)
