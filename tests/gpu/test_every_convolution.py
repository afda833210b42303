"""The convolutions of all dimensions and the transposed ones on the GPU: derivatives, autocast,
function transforms and compilation.

Values, gradients and layouts of all are in test_reference.py, PyTorch's own samples in
test_upstream_opdb_gpu.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.op_cases import CASES
from support.conv.references import assert_close
from support.conv.training_steps import twin_layers
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.models.problems import problems_of

KINDS = [f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3)]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def exact_and_untimed(cudnn_flags: Callable[..., None]) -> None:
    ca.set_sampling("heuristic")
    cudnn_flags(allow_tf32=False, deterministic=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def layers(kind: str) -> tuple[nn.Module, Any]:
    return twin_layers(8, 12, 3, padding=1, stride=2, kind=kind)


@pytest.fixture
def input(kind: str) -> Tensor:
    return torch.randn((4, 8, 11, 10, 9)[: 2 + int(kind[-2])], device="cuda")


def test_the_problems_that_a_layer_makes(kind: str, layers: tuple[nn.Module, Any]) -> None:
    """A transposed convolution is dgrad, its backward fprop and wgrad of the same shapes."""
    _, ours = layers
    size = (4, 8, 11, 10, 9)[: 2 + int(kind[-2])]
    problems = problems_of(ours, torch.randn(size, device="cuda", requires_grad=True))
    transposed = "Transpose" in kind
    assert [p.op for p in problems] == (
        ["dgrad", "fprop", "wgrad"] if transposed else ["fprop", "dgrad", "wgrad"]
    )
    for problem in problems:
        assert problem.spatial_dims == int(kind[-2])
        assert problem.weight_shape == tuple(ours.weight.shape)
        assert (problem.output_shape if transposed else problem.input_shape) == size


def test_the_fast_path_takes_what_layers_pass(
    kind: str, layers: tuple[nn.Module, Any], input: Tensor
) -> None:
    theirs, ours = layers
    dims, transposed = int(kind[-2]), "Transpose" in kind
    fast = getattr(_C, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    middle = (0, 1, 1) if transposed else (1, 1)  # output_padding, groups, dilation
    output = fast(input, ours.weight, ours.bias, ours.stride, 1, *middle, "heuristic", 1 << 30)
    assert_close(output, theirs(input), 1e-5)
    plain = (input, ours.weight, None, 2, 1, *middle, None, None)
    assert isinstance(fast(*plain), Tensor)
    for at, other in (
        (0, input.cpu()),
        (0, input.as_subclass(type("Subclass", (Tensor,), {}))),
        (3, [2] * dims),
        (3, (2,) * (dims + 1)),
        (4, -1),
        (len(plain) - 2, ""),
        (len(plain) - 1, -1),
    ):
        assert fast(*plain[:at], other, *plain[at + 1 :]) is NotImplemented
    with pytest.raises(TypeError, match="arguments"):
        fast(*plain[:-1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["padding", "stride_leaves_a_rest", "groups", "three_dimensions"])
def test_derivatives(name: str, transposed: bool) -> None:
    case = CASES[name]
    input, weight, bias, grad_output = case.tensors("cuda")
    arguments: tuple[Any, ...] = case.geometry
    if transposed:
        stride, padding, output_padding, dilation, groups = case.transposed_geometry
        arguments = (stride, padding, output_padding, groups, dilation)
        shape = case.input_shape[1]
        bias = torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
        input = grad_output
    function = getattr(ca.functional, f"conv{'_transpose' * transposed}{case.dims}d")
    tensors = (input, weight, bias)
    assert gradcheck(lambda *t: function(*t, *arguments), tensors, fast_mode=True)
    assert gradgradcheck(lambda *t: function(*t, *arguments), tensors, fast_mode=True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["groups", "stride_leaves_a_rest", "one_dimension", "three_dimensions"]
)
def test_opcheck(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    """The operators stand below autograd."""
    for op, arguments in CASES[name].calls("cuda", dtype, channels_last):
        found = opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_second_derivatives(layers: tuple[nn.Module, Any], input: Tensor) -> None:
    """As of a gradient penalty."""
    results = []
    for layer in layers:
        leaf = input.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(leaf).sin().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [leaf, layer.weight]))
    for right, mine in zip(*results, strict=True):
        assert_close(mine, right, 1e-5)


def test_func_transforms(layers: tuple[nn.Module, Any], input: Tensor) -> None:
    results = []
    for module in layers:

        def loss(x: Tensor, module: nn.Module = module) -> Tensor:
            return module(x).sin().sum()

        parameters = dict(module.named_parameters())

        def of_parameters(p: dict[str, Tensor], x: Tensor, module: nn.Module = module) -> Tensor:
            return functional_call(module, p, (x.unsqueeze(0),)).square().sum()

        results.append(
            [
                grad(loss)(input),
                *jvp(loss, (input,), (torch.ones_like(input),)),
                vmap(grad(loss))(input),
                *vmap(grad(of_parameters), in_dims=(None, 0))(parameters, input).values(),
            ]
        )
    for right, mine in zip(*results, strict=True):
        assert_close(mine, right, 1e-5)


@pytest.mark.parametrize("kind", ["Conv2d"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_backward_under_autocast_is_judged_in_its_own_type(
    layers: tuple[nn.Module, Any], input: Tensor, dtype: torch.dtype
) -> None:
    """Autocast would recast the reference, and right engines would be rejected for it."""
    _, ours = layers
    ours.sampling = "race"
    output = ours(input)
    with torch.autocast("cuda", dtype=dtype):
        output.sum().backward()
    made = {choice.problem.op: choice for choice in ca.choices()}
    assert set(made) == {"fprop", "wgrad"}
    assert all(choice.problem.dtype is torch.float32 for choice in made.values())
    assert not made["wgrad"].rejected


@pytest.mark.parametrize("kind", ["Conv2d"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight and bias"])
def test_frozen(layers: tuple[nn.Module, Any], input: Tensor, frozen: str) -> None:
    gradients = []
    for module in layers:
        module.weight.requires_grad_("weight" not in frozen)
        module.bias.requires_grad_("bias" not in frozen)
        leaf = input.detach().clone().requires_grad_(frozen != "input")
        module(leaf).sin().sum().backward()
        gradients.append([leaf.grad, module.weight.grad, module.bias.grad])
    for right, mine in zip(*gradients, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert_close(mine, right, 1e-5)
    ops_run = {c.problem.op for c in ca.choices()}
    assert ("wgrad" in ops_run) == ("weight" not in frozen)
    assert ("dgrad" in ops_run) == (frozen != "input")


@pytest.mark.parametrize("kind", ["Conv2d"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(layers: tuple[nn.Module, Any], input: Tensor, reentrant: bool) -> None:
    results = []
    for module in layers:
        leaf = input.detach().clone().requires_grad_()
        checkpoint(module, leaf, use_reentrant=reentrant).sin().sum().backward()
        results.append([leaf.grad, module.weight.grad])
    for right, mine in zip(*results, strict=True):
        assert_close(mine, right, 1e-5)


# Inductor


class Autoencoder(nn.Module):
    """A small U-Net without its skips: convolutions down, transposed ones up."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, transposed, norm = (
            getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose", "BatchNorm")
        )
        self.down = nn.Sequential(
            conv(4, 32, 3, stride=2, padding=1),
            norm(32),
            nn.ReLU(),
            conv(32, 48, 3, padding="same"),
        )
        self.up = nn.Sequential(
            transposed(48, 32, 2, stride=2, bias=False),
            norm(32),
            nn.SiLU(),
            transposed(32, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)).tanh()


def autoencoders(dims: int, channels_last: bool) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    theirs = Autoencoder(dims).cuda()
    input = torch.randn(2, 4, *[16] * dims, device="cuda")
    if channels_last:
        theirs.to(memory_format=LAST[dims + 2])
        input = input.contiguous(memory_format=LAST[dims + 2])
    ours = copy.deepcopy(theirs)
    for module in ours.modules():
        if type(module).__name__ in KINDS:
            module.__class__ = getattr(ca, type(module).__name__)
            module.sampling = "heuristic"
    return theirs, ours, input


def convolutions(code: str) -> int:
    """Those of a forward, of either kind."""
    names = ("extern_kernels.convolution(", "conv_fprop.default(", "conv_transpose.default(")
    return sum(code.count(name) for name in names)


LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize(("dims", "channels_last"), LAYOUTS)
@pytest.mark.parametrize("freezing", [False, True])
def test_compiled_inference(
    dims: int, channels_last: bool, freezing: bool, fresh_compiler: None
) -> None:
    from torch._inductor.utils import run_and_get_code

    theirs, ours, input = autoencoders(dims, channels_last)
    kernels = []
    with torch.no_grad(), torch._inductor.config.patch(freezing=freezing):
        expected = theirs.eval()(input)
        for model in (theirs, ours):
            compiled = torch.compile(model.eval(), fullgraph=True)
            output, codes = run_and_get_code(compiled, input)
            code = "\n".join(codes)
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
            assert convolutions(code) == 4
            kernels.append(code.count(".run("))
    assert code.count("conv_fprop.default(") == code.count("conv_transpose.default(") == 2
    assert "mark_input.default(" not in code
    assert "mark_output.default(" not in code
    assert kernels[1] == kernels[0]


@pytest.mark.parametrize(("dims", "channels_last"), LAYOUTS)
def test_compiled_training(dims: int, channels_last: bool, fresh_compiler: None) -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    theirs, ours, input = autoencoders(dims, channels_last)
    kernels, grads = [], []
    for model in (theirs, ours):
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_fw_bw_and_get_code(lambda compiled=compiled: compiled(input))
        kernels.append(sum(code.count(".run(") for code in codes))
        grads.append([parameter.grad for parameter in model.parameters()])
    for right, mine in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)
    forward, backward = codes
    assert convolutions(forward) == 4
    assert backward.count("conv_fprop.default(") == 2, "the gradients of the transposed"
    assert backward.count("conv_dgrad.default(") == 1, "the input wants no gradient"
    assert backward.count("conv_wgrad.default(") == 4
    assert "convolution_backward.default(" not in backward
    assert kernels[1] <= kernels[0]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_freezing_with_as_many_input_as_output_channels(dims: int, fresh_compiler: None) -> None:
    """Inductor of torch 2.11 folds the batch norm into the wrong channels of PyTorch's layer."""
    model = nn.Sequential(
        getattr(ca, f"ConvTranspose{dims}d")(8, 8, 2, stride=2), getattr(nn, f"BatchNorm{dims}d")(8)
    )
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    model.eval().cuda()
    input = torch.randn(2, 8, *[8] * dims, device="cuda")
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        output = torch.compile(model, fullgraph=True)(input)
        torch.testing.assert_close(output, model(input), rtol=1e-3, atol=1e-4)
