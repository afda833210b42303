"""The ops on the CPU: values, derivatives to second order, registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_cases import CASES, Case, ops
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

ALL_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(
    params=[
        (name, op)
        for name, case in CASES.items()
        for op in ("fprop", "dgrad", "wgrad", "transpose")
        if op != "transpose" or case.is_symmetric  # it pads both sides alike
    ],
    ids=":".join,
)
def function(request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """An op as a function of its tensors alone, and those tensors."""
    name, op = request.param
    return functions(CASES[name])[op]


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


def test_values_are_those_of_torch_nn_grad() -> None:
    """And of its other spelling, aten.convolution_backward."""
    case = CASES["groups"]
    input, weight, _, grad_output = case.tensors(requires_grad=False)
    arguments = (case.stride, case.padding, case.dilation, case.groups)
    by_aten = torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, *case.geometry[:3], False, [0, 0], case.groups,
        [True, True, False],
    )  # fmt: skip
    dgrad = ops.conv_dgrad(grad_output, weight, list(case.input_shape), *case.geometry)
    wgrad = ops.conv_wgrad(grad_output, input, list(case.weight_shape), *case.geometry)
    torch.testing.assert_close(dgrad, by_aten[0])
    torch.testing.assert_close(wgrad, by_aten[1])
    torch.testing.assert_close(
        dgrad, torch.nn.grad.conv2d_input(case.input_shape, weight, grad_output, *arguments)
    )
    torch.testing.assert_close(
        wgrad, torch.nn.grad.conv2d_weight(input, case.weight_shape, grad_output, *arguments)
    )


def test_first_derivatives(
    function: tuple[Callable[..., Tensor], tuple[Tensor, ...]],
) -> None:
    assert gradcheck(*function)


def test_second_derivatives(
    function: tuple[Callable[..., Tensor], tuple[Tensor, ...]],
) -> None:
    assert gradgradcheck(*function, fast_mode=True)


def test_third_derivative() -> None:
    """Each backward is written in the ops themselves, so there is no last derivative."""
    case = CASES["padding"]
    results = []
    for convolve in (
        lambda x, w: ops.conv_fprop(x, w, None, *case.geometry),
        lambda x, w: case.plain(x, w),
    ):
        input, weight, _, _ = case.tensors()
        value = convolve(input, weight).pow(4).sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(value, input, create_graph=True)
            value = derivative.sin().sum()
        results.append(torch.autograd.grad(value, weight)[0])
    torch.testing.assert_close(results[0], results[1])
    assert results[1].norm() > 0


@pytest.mark.parametrize("trigger", ["func.grad", "vmap", "jvp", "compile"])
def test_transforms_leave_the_ops_in_place(trigger: str) -> None:
    """functorch's thread-local state outlives its transforms: it must not be taken for one.

    Inside a transform the ops hand over to ATen's convolution, which has the rules; afterwards
    they must not, or the search would be silently gone for the rest of the thread's life.
    """
    case = CASES["plain"]
    input, weight, _, _ = case.tensors()
    x = torch.randn(3)
    if trigger == "func.grad":
        torch.func.grad(lambda t: t.sin().sum())(x)
    elif trigger == "vmap":
        torch.func.vmap(torch.sin)(x)
    elif trigger == "jvp":
        torch.func.jvp(torch.sin, (x,), (x,))
    else:
        torch._dynamo.reset()
        torch.compile(torch.sin, backend="aot_eager")(x.requires_grad_())
    node = ops.conv_fprop(input, weight, None, *case.geometry).grad_fn
    assert "Convolution" not in type(node).__name__, "this is ATen's node, not ours"


def test_only_the_asked_gradients_are_computed() -> None:
    case = CASES["plain"]
    for wanted in range(3):
        tensors = case.tensors(requires_grad=False)[:3]
        tensors[wanted].requires_grad_()
        ops.conv_fprop(*tensors, *case.geometry).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == wanted for i in range(3)]
        tensors = [t.detach() for t in functions(case)["transpose"][1]]
        tensors[wanted].requires_grad_()
        ops.conv_transpose(*tensors, *case.transposed_geometry).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == wanted for i in range(3)]


@pytest.mark.basic(4)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "name", ["plain", "groups", "asymmetric", "one_dimension", "three_dimensions"]
)
def test_opcheck(name: str, channels_last: bool, requires_grad: bool) -> None:
    case = CASES[name]
    given = ("cpu", torch.float32, requires_grad, channels_last)
    input, weight, bias, grad_output = case.tensors(*given)
    calls = [
        (ops.conv_fprop, (input, weight, bias, *case.geometry)),
        (ops.conv_fprop, (input, weight, None, *case.geometry, "heuristic", 0)),
        (ops.conv_dgrad, (grad_output, weight, list(case.input_shape), *case.geometry)),
        (ops.conv_wgrad, (grad_output, input, list(case.weight_shape), *case.geometry)),
    ]
    if case.is_symmetric:
        bias = torch.randn(case.input_shape[1], requires_grad=requires_grad)
        arguments = (grad_output, weight, bias, *case.transposed_geometry)
        calls += [
            (ops.conv_transpose, arguments),
            (ops.conv_transpose, (*arguments[:2], None, *arguments[3:], "heuristic", 0)),
        ]
    for op, arguments in calls:
        result = opcheck(op.default, arguments, test_utils=ALL_UTILS)
        assert result == dict.fromkeys(ALL_UTILS, "SUCCESS")


def test_sampling_and_workspace_limit_do_not_matter_here() -> None:
    case = CASES["plain"]
    input, weight, bias, _ = case.tensors()
    plain = ops.conv_fprop(input, weight, bias, *case.geometry)
    assert torch.equal(
        plain, ops.conv_fprop(input, weight, bias, *case.geometry, "sample_once", 1024)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_for_pytorchs(dtype: torch.dtype) -> None:
    """The bias too. The gradients are of the types of what they are gradients of."""
    case = CASES["stride"]
    for name, theirs in (("fprop", case.plain), ("transpose", None)):
        function, tensors = functions(case)[name]
        tensors = tuple(t.detach().float().requires_grad_() for t in tensors)
        stride, padding, output_padding, dilation, groups = case.transposed_geometry
        with torch.autocast("cpu", dtype=dtype):
            actual = function(*tensors)
            expected = (
                theirs(*tensors)
                if theirs is not None
                else torch.nn.functional.conv_transpose2d(
                    *tensors, stride, padding, output_padding, groups, dilation
                )
            )
        assert actual.dtype is expected.dtype is dtype
        assert torch.equal(actual, expected)
        grads = torch.autograd.grad(actual.float().sum(), tensors)
        assert [grad.dtype for grad in grads] == [torch.float32] * 3


def test_derivatives_with_an_output_padding_of_a_stride_or_more() -> None:
    """Such a transposed convolution is not the gradient of a convolution."""
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4, 3), (3, 2, 3, 2), (2,))
    ]

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        result: Tensor = ops.conv_transpose(x, w, b, [1, 2], [0, 1], [1, 2], [2, 3], 1)
        return result

    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


def test_vmap_of_the_transposed() -> None:
    case = CASES["stride"]
    function, tensors = functions(case)["transpose"]
    several = torch.stack([tensors[0], 2 * tensors[0]])
    batched = torch.func.vmap(lambda g: function(g, *tensors[1:]))(several)
    torch.testing.assert_close(batched, torch.stack([function(g, *tensors[1:]) for g in several]))
    _, tangent = torch.func.jvp(lambda g: function(g, *tensors[1:]), tensors[:1], tensors[:1])
    torch.testing.assert_close(tangent, function(*tensors[:2], torch.zeros_like(tensors[2])))


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
