"""The operators of batch norms against PyTorch's own batch norm, activation and autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.conv.references import assert_close
from support.covering import covering
from support.norms.cases import EPS, Norm, by_operators, by_pytorch, norm
from torch import Tensor

import cudnn_autotune  # noqa: F401  (registers the operators)
from cudnn_autotune.norms.operators import unsupported
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

ops = torch.ops.cudnn_autotune
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}


def compare(given: Norm) -> None:
    """Asserts that the operators' results are those of PyTorch in float64."""
    found = by_operators(given)
    expected = by_pytorch(given.to(torch.float64))
    for name, wanted in vars(expected).items():
        result = getattr(found, name)
        if wanted is None:
            assert result is None, name
            continue
        assert_close(result, wanted, TOLERANCES[given.input.dtype], name)
        if result.dim() > 1:
            assert result.dtype is given.input.dtype
            assert result.stride() == given.input.stride()


@covering(dtype=list(TOLERANCES), residual=[False, True], activation=list(NORM_ACTIVATIONS))
def test_it_is_pytorchs(dtype: torch.dtype, residual: bool, activation: str) -> None:
    compare(norm((4, 6, 5, 3), dtype, activation=activation, residual=residual))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4), (3, 5, 4, 2), (2, 5, 3, 4, 2), (9, 3, 1, 1)])
def test_spatial_dimensions(shape: tuple[int, ...], channels_last: bool) -> None:
    compare(norm(shape, channels_last=channels_last, residual=True, second=True))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_parameters(affine: bool, parameters: torch.dtype) -> None:
    given = norm((4, 6, 5), torch.bfloat16, affine=affine, parameters=parameters)
    compare(given)
    if affine:
        found = by_operators(given)
        assert found.grad_weight.dtype is parameters
        assert found.mean.dtype is torch.float32


def test_a_large_mean_does_not_cancel() -> None:
    given = norm((8, 4, 9, 9), offset=1000.0)
    found, expected = by_operators(given), by_pytorch(given.to(torch.float64))
    assert_close(found.unbiased_var, expected.unbiased_var, 1e-5)


@pytest.mark.parametrize("activation", ["identity", "relu", "sigmoid", "silu"])
@pytest.mark.parametrize("residual", [False, True])
def test_autograd_gives_the_gradients(activation: str, residual: bool) -> None:
    given = norm((3, 4, 2, 3), torch.float64, activation=activation, residual=residual)
    leaves = [
        value.detach().requires_grad_() if isinstance(value, Tensor) else value
        for value in given.operands
    ]
    output, *others = ops.batch_norm_act(*leaves)
    assert output.requires_grad
    assert not any(values.requires_grad for values in others)
    output.backward(given.grad_output)
    expected = by_pytorch(given)
    names = ("grad_input", "grad_weight", "grad_bias", "grad_residual")
    for name, leaf in zip(names, leaves, strict=False):
        if isinstance(leaf, Tensor):
            assert_close(leaf.grad, getattr(expected, name), 1e-12, name)


@pytest.mark.parametrize("activation", list(NORM_ACTIVATIONS))
def test_the_operator_of_a_converted_pair(activation: str) -> None:
    """It updates running statistics, and its gradients have derivatives."""
    given = norm((3, 4, 2, 3), torch.float64, activation=activation)
    running = [torch.rand(4, dtype=torch.float64) for _ in range(2)]
    mean_of_all, var_of_all = (one.clone() for one in running)
    leaves = [given.input.requires_grad_()]
    for values in (given.weight, given.bias):
        assert values is not None
        leaves.append(values.requires_grad_())

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = ops.batch_norm_act_tracking(
            *leaves, *running, activation, 0.25, EPS
        )
        return found

    output, mean, inv_std = call(*leaves)
    x, weight, bias = leaves
    wanted = F.batch_norm(x, mean_of_all, var_of_all, weight, bias, True, 0.25, EPS)
    assert_close(output, NORM_ACTIVATIONS[activation].forward(wanted), 1e-12)
    for one, other in zip(running, (mean_of_all, var_of_all), strict=True):
        assert_close(one, other, 1e-12)
    assert output.requires_grad
    assert not mean.requires_grad
    assert not inv_std.requires_grad
    with torch.inference_mode():
        assert torch.equal(call(*leaves)[0], output)
    assert torch.autograd.gradcheck(lambda *given: call(*given)[0], leaves)
    assert torch.autograd.gradgradcheck(lambda *given: call(*given)[0], leaves)
    utilities = ("test_schema", "test_autograd_registration")
    operands = (*leaves, *running, activation, 0.25, EPS)
    torch.library.opcheck(ops.batch_norm_act_tracking.default, operands, test_utils=utilities)


def saved_bytes(given: Norm) -> int:
    """Bytes that grow with the batch and that a forward keeps for its backward, each counted
    once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() > 1 or tensor.dtype == torch.uint8:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    input = given.input.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.batch_norm_act(input, *given.operands[1:])
    return sum(kept.values())


@pytest.mark.parametrize(
    ("activation", "residual", "tensors"),
    [
        ("identity", False, 1),
        ("relu", False, 1),
        ("silu", False, 1),
        ("identity", True, 1),
        ("relu", True, 2),
        ("silu", True, 2),
    ],
)
def test_the_least_is_saved(activation: str, residual: bool, tensors: int) -> None:
    given = norm((4, 3, 6), activation=activation, residual=residual)
    assert saved_bytes(given) == tensors * given.input.nbytes


@covering(
    dtype=list(TOLERANCES),
    channels=[8, 64, 72, 152],
    spatial=[(), (5,), (5, 3), (2, 5, 3)],
    activation=["relu", "relu6"],
)
def test_a_mask_takes_the_place_of_the_output(
    activation: str, spatial: tuple[int, ...], channels: int, dtype: torch.dtype
) -> None:
    given = norm((4, channels, *spatial), dtype, activation=activation, residual=True)
    rows = {
        name: value.movedim(1, -1).contiguous().movedim(-1, 1)
        for name, value in vars(given).items()
        if isinstance(value, Tensor) and value.dim() > 1
    }
    given = replace(given, **rows)
    output, mean, inv_std, _, mask = ops.batch_norm_act(*given.operands)
    assert mask.nbytes * 16 == output.nbytes
    compare(given)
    assert saved_bytes(given) == given.input.nbytes * 17 // 16
    grads = [
        ops.batch_norm_act_backward(
            given.grad_output, None, given.input.contiguous(), of_output, given.weight, given.bias,
            None, mean, inv_std, activation, [True] * 4,
        )
        for of_output in (mask, output)
    ]  # fmt: skip
    for by_mask, by_output in zip(*grads, strict=True):
        assert torch.equal(by_mask, by_output)
        assert by_mask.stride() == by_output.stride()


@pytest.mark.parametrize(
    ("shape", "channels_last", "activation"),
    [
        ((4, 8, 5, 3), False, "relu"),  # in planes
        ((4, 6, 5, 3), True, "relu"),  # rows of 24 bytes
        ((4, 8, 5, 3), True, "sigmoid"),
        ((4, 8, 5, 3), True, "silu"),
        ((4, 8, 5, 3), True, "identity"),
    ],
)
def test_without_a_mask(shape: tuple[int, ...], channels_last: bool, activation: str) -> None:
    given = norm(shape, activation=activation, residual=True, channels_last=channels_last)
    assert ops.batch_norm_act(*given.operands)[4].shape == (0,)
    compare(given)


def test_what_a_mask_says_of_values_that_are_no_numbers() -> None:
    """PyTorch's threshold passes the gradient of what is not at most 0."""
    given = norm((2, 8, 1, 4), residual=True, channels_last=True)
    given.residual[0, 0] = math.nan
    found, expected = by_operators(given), by_pytorch(given)
    assert_close(found.grad_residual, expected.grad_residual, 1e-6)


def test_a_mask_of_another_norm_is_refused() -> None:
    given = norm((4, 8, 5, 3), residual=True, channels_last=True)
    _, mean, inv_std, _, mask = ops.batch_norm_act(*given.operands)
    for wrong, activation in ((mask[1:], "relu"), (mask, "sigmoid"), (mask[:0], "relu")):
        with pytest.raises(ValueError, match="output: expected the output or the mask of a norm"):
            ops.batch_norm_act_backward(
                given.grad_output, None, given.input, wrong, given.weight, given.bias, None,
                mean, inv_std, activation, [True] * 4,
            )  # fmt: skip


def test_a_second_derivative_with_a_residual_is_refused() -> None:
    given = norm((4, 3, 6), residual=True)
    input = given.input.requires_grad_()
    output = ops.batch_norm_act(input, *given.operands[1:])[0]
    (gradient,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        gradient.sum().backward()


@pytest.mark.parametrize("mask", [[True, False, False, False], [False, True, True, True]])
def test_what_the_mask_leaves_out_is_none(mask: list[bool]) -> None:
    given = norm((4, 3, 6), residual=True)
    output, mean, inv_std, *_ = ops.batch_norm_act(*given.operands)
    found = ops.batch_norm_act_backward(
        given.grad_output, None, given.input, output, given.weight, given.bias, given.residual,
        mean, inv_std, "relu", mask,
    )  # fmt: skip
    assert [gradient is not None for gradient in found] == mask


def test_no_result_is_an_argument() -> None:
    given = norm((4, 3, 6), activation="identity", residual=True)
    assert by_operators(given).grad_residual.data_ptr() != given.grad_output.data_ptr()


@covering(
    channels=[3, 4],
    residual=[False, True],
    mask=[[True, True, True, True], [False, True, False, True]],
)
def test_opcheck(channels: int, residual: bool, mask: list[bool]) -> None:
    given = norm((3, channels, 2, 3), residual=residual, channels_last=True)
    output, mean, inv_std, _, made = ops.batch_norm_act(*given.operands)
    output = made if made.numel() else output
    arguments = [v.requires_grad_() if isinstance(v, Tensor) else v for v in given.operands]
    torch.library.opcheck(ops.batch_norm_act.default, arguments)
    torch.library.opcheck(
        ops.batch_norm_act_backward.default,
        (given.grad_output, None, given.input.detach(), output, given.weight, given.bias,
         given.residual, mean, inv_std, "relu", mask),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_it_compiles_with_its_gradient() -> None:
    given = norm((4, 6, 5, 3), residual=True, channels_last=True)

    def step(input: Tensor) -> Tensor:
        output, mean, *_ = ops.batch_norm_act(input, *given.operands[1:])
        return (output * mean.sum()).sum()

    gradients = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        input = given.input.detach().requires_grad_()
        run(input).backward()
        gradients.append(input.grad)
    assert torch.equal(*gradients)


def test_strided_operands() -> None:
    given = norm((4, 6, 5, 3))
    wide = torch.empty(4, 6, 5, 8)[..., :3].copy_(given.input)
    strided = Norm(wide, *list(vars(given).values())[1:])
    found, expected = by_operators(strided), by_pytorch(given)
    assert_close(found.output, expected.output, 1e-6)
    assert_close(found.grad_input, expected.grad_input, 2e-6)
    assert found.output.is_contiguous()


def test_autocast_leaves_the_operands_as_they_are() -> None:
    given = norm((4, 6, 5, 3), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = ops.batch_norm_act(*given.operands)
    outside = ops.batch_norm_act(*given.operands)
    for a, b in zip(inside, outside, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_stay_in_their_channel(value: float) -> None:
    given = norm((4, 3, 6), activation="identity")
    given.input[1, 1, 2] = value
    found, expected = by_operators(given), by_pytorch(given)
    assert torch.equal(found.output.isfinite(), expected.output.isfinite())
    assert torch.equal(found.grad_input.isfinite(), expected.grad_input.isfinite())


def test_one_value_a_channel_is_pytorchs_error() -> None:
    input = torch.randn(1, 3, 1)
    with pytest.raises(ValueError) as expected:
        F.batch_norm(input, None, None, training=True)
    with pytest.raises(ValueError) as found:
        ops.batch_norm_act(input, None, None, None, "relu", EPS)
    assert str(expected.value) in str(found.value)
    assert unsupported(input, None, None) == str(expected.value)


def test_an_empty_input_is_left_to_pytorch() -> None:
    given = norm((0, 3, 6))
    assert unsupported(*given.operands[:3]) == "input is empty"
    found = by_operators(given)
    assert found.output.shape == F.batch_norm(given.input, None, None, training=True).shape
    assert torch.equal(found.grad_weight, torch.zeros(3))
    assert found.mean.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.ones(4)}, "input: expected 2 to 5 dimensions, got 1"),
        ({"input": torch.ones(4, 3, dtype=torch.int32)}, "input: torch.int32 is not served"),
        ({"weight": torch.ones(4)}, r"weight: expected shape \(3,\)"),
        ({"weight": torch.ones(3, dtype=torch.float16)}, "weight: expected torch.float32"),
        ({"bias": torch.ones(1)}, r"bias: expected shape \(3,\)"),
        ({"residual": torch.ones(4, 3, 1)}, r"residual: expected the input's shape \(4, 3, 6\)"),
        ({"residual": torch.ones(4, 3, 6).half()}, "residual: expected torch.float32 on cpu"),
        ({"activation": "elu"}, "activation: 'elu' is not served; allowed are identity, relu"),
    ],
)
def test_bad_operands(change: dict[str, object], message: str) -> None:
    given = norm((4, 3, 6), residual=True)
    operands = {**vars(given), **change}
    names = ("input", "weight", "bias", "residual", "activation")
    if "input" in change:
        operands |= {"weight": None, "bias": None, "residual": None}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.batch_norm_act(*(operands[name] for name in names), EPS)
    if "activation" not in change:
        assert unsupported(*(operands[name] for name in names[:4])) is not None
    else:
        assert unsupported(given.input, given.weight, given.bias, given.residual) is None


def test_transforms_of_torch_func_are_refused() -> None:
    given = norm((4, 3, 6))
    reasons = []

    def total(input: Tensor) -> Tensor:
        reasons.append(unsupported(input, *given.operands[1:3]))
        return ops.batch_norm_act(input, *given.operands[1:])[0].sum()

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(total)(given.input)
    assert reasons == ["a transform of torch.func is active"]


def test_forward_mode_derivatives_are_refused() -> None:
    given = norm((4, 3, 6))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given.input, torch.ones_like(given.input))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            ops.batch_norm_act(dual, *given.operands[1:])


def test_checkpointing_computes_it_again() -> None:
    given = norm((4, 3, 6), residual=True)
    gradients = []
    for recomputes in (False, True):
        input = given.input.detach().requires_grad_()

        def block(input: Tensor) -> Tensor:
            return ops.batch_norm_act(input, *given.operands[1:])[0].square()

        if recomputes:
            output = torch.utils.checkpoint.checkpoint(block, input, use_reentrant=False)
        else:
            output = block(input)
        output.sum().backward()
        gradients.append(input.grad)
    assert torch.equal(*gradients)
