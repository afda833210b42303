"""The operators' CPU kernels: values, schemas, fake kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.conv.op_cases import CASES, Case, ops
from torch import Tensor
from torch.library import opcheck

ALL_UTILS = ("test_schema", "test_faketensor")  # they stand below autograd


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def functions(case: Case) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    input, weight, bias, grad_output = case.tensors()
    found: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "fprop": (
            lambda x, w, b: ops.conv_fprop(x, w, b, *case.geometry),
            (input, weight, bias),
        ),
        "dgrad": (
            lambda g, w: ops.conv_dgrad(g, w, list(case.input_shape), *case.geometry),
            (grad_output, weight),
        ),
        "wgrad": (
            lambda g, x: ops.conv_wgrad(g, x, list(case.weight_shape), *case.geometry),
            (grad_output, input),
        ),
    }
    if case.is_symmetric:
        bias_of_input = torch.randn(case.input_shape[1], dtype=torch.float64, requires_grad=True)
        found["transpose"] = (
            lambda g, w, b: ops.conv_transpose(g, w, b, *case.transposed_geometry),
            (grad_output, weight, bias_of_input),
        )
    return found


def test_values(case: Case) -> None:
    input, weight, bias, grad_output = case.tensors()
    expected = case.plain(input, weight, bias)
    grad_input, grad_weight = torch.autograd.grad(expected, (input, weight), grad_output)
    called = functions(case)
    with torch.no_grad():
        found = {name: f(*tensors) for name, (f, tensors) in called.items()}
    torch.testing.assert_close(found["fprop"], expected)
    torch.testing.assert_close(found["dgrad"], grad_input)
    torch.testing.assert_close(found["wgrad"], grad_weight)
    if case.is_symmetric:
        over_channels = called["transpose"][1][2].view(-1, *[1] * case.dims)
        torch.testing.assert_close(found["transpose"], grad_input + over_channels)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "name", ["plain", "groups", "asymmetric", "one_dimension", "three_dimensions"]
)
def test_opcheck(name: str, channels_last: bool) -> None:
    for op, arguments in CASES[name].calls("cpu", torch.float32, channels_last):
        result = opcheck(op.default, arguments, test_utils=ALL_UTILS)
        assert result == dict.fromkeys(ALL_UTILS, "SUCCESS")


def test_schemas() -> None:
    """The interface that saved programs (torch.export) rely on."""
    tail = (
        "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
        'str sampling="", int workspace_limit=-1) -> Tensor'
    )
    schemas = {
        name: str(getattr(ops, name).default._schema).removeprefix("cudnn_autotune::")
        for name in ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose")
    }
    assert schemas == {
        "conv_fprop": f"conv_fprop(Tensor input, Tensor weight, Tensor? bias, {tail}",
        "conv_transpose": (
            "conv_transpose(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, "
            "SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, SymInt groups, "
            'str sampling="", int workspace_limit=-1) -> Tensor'
        ),
        "conv_dgrad": f"conv_dgrad(Tensor grad_output, Tensor weight, SymInt[] input_size, {tail}",
        "conv_wgrad": f"conv_wgrad(Tensor grad_output, Tensor input, SymInt[] weight_size, {tail}",
    }
