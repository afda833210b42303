"""``convert(model)``: batch norms that train by this package's operators.

On a CPU they do so only where a test asks for it, and without being measured.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import pickle
import pydoc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.norms import models as norm_models
from support.norms.models import Projected, Residual, conv, data, penalties
from support.norms.served import norms_on_cpu
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_autotune as ca
from cudnn_autotune.norms import batch_norms, synchronised


class Calls(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def activations() -> Iterator[list[str]]:
    """Norms on a CPU take the way of those on a GPU, and are the operators' without being timed.
    Yields a list of what each was computed with."""
    with norms_on_cpu() as found, ca.flags(sampling="heuristic"):
        yield found


def converted(model: nn.Module) -> nn.Module:
    return ca.convert(model)


check_steps = functools.partial(norm_models.check_steps, prepare=converted)


def test_classes_are_swapped_and_given_back() -> None:
    model = Residual()
    before, state = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    assert type(ca.convert(model, norms=False).norm) is nn.BatchNorm2d
    converted(model)
    assert type(model.norm) is batch_norms.BatchNorm2d
    assert isinstance(model.norm, nn.BatchNorm2d)
    named, _, arguments = repr(model.norm).partition("(")
    assert pydoc.locate(named) is batch_norms.BatchNorm2d
    assert arguments.startswith("8, eps=1e-05")
    assert "2 batch norms, 0 measured" in repr(ca.conversion(model))
    waiting = "2 batch norms: measured when they first run in training on a GPU"
    assert waiting in str(ca.conversion(model)).splitlines()
    assert ca.conversion(model).norms == {"norm": (), "norm2": ()}
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert type(pickle.loads(pickle.dumps(model)).norm) is batch_norms.BatchNorm2d
    assert type(copy.deepcopy(model).norm) is batch_norms.BatchNorm2d
    ca.revert(model)
    assert [type(module) for module in model.modules()] == before


def test_a_model_that_has_nothing_but_norms() -> None:
    model = converted(nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4)))
    assert ca.conversion(model).norms == {"0": ()}


def test_a_synchronised_norm_is_converted_and_given_back() -> None:
    model = nn.Sequential(conv(8, 8), nn.SyncBatchNorm(8), nn.ReLU())
    plain, x = copy.deepcopy(model), torch.randn(4, 8, 6, 5)
    assert type(ca.convert(model, norms=False)[1]) is nn.SyncBatchNorm
    converted(model)
    assert type(model[1]) is synchronised.SyncBatchNorm
    assert ca.conversion(model).norms == {}  # nothing is chosen for it
    assert type(pickle.loads(pickle.dumps(model))[1]) is synchronised.SyncBatchNorm
    for one in (model, plain):  # one process is no group
        one(x)
        one.eval()
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert "1" in [node.target for node in fx.symbolic_trace(model).graph.nodes]  # it is one call
    assert type(ca.revert(model)[1]) is nn.SyncBatchNorm


def test_a_subclass_and_a_forward_of_the_module_stay() -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Own(4), nn.BatchNorm2d(4))
    model[1].forward = lambda input: input  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="has no convolution"):
        converted(model)
    assert [type(module) for module in model] == [Own, nn.BatchNorm2d]


def test_a_sequential_of_a_users_decides_what_it_calls() -> None:
    class Shortened(nn.Sequential):
        def __iter__(self) -> Iterator[nn.Module]:
            return iter([*self._modules.values()][:-1])

    plain = Shortened(nn.BatchNorm2d(8), nn.ReLU(), nn.Sigmoid())
    (x,) = data(4, 8, 6, 5, count=1)
    expected = copy.deepcopy(plain)(x)
    torch.testing.assert_close(converted(plain)(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_lazy_norm_becomes_a_converted_one(dims: int, activations: list[str]) -> None:
    torch.manual_seed(0)
    lazy = getattr(nn, f"LazyBatchNorm{dims}d")
    model, theirs = (nn.Sequential(lazy(), nn.ReLU()) for _ in range(2))
    converted(model)
    assert type(pickle.loads(pickle.dumps(model))[0]) is getattr(
        batch_norms, f"LazyBatchNorm{dims}d"
    )
    for x in data(4, 8, *(5,) * dims):
        torch.testing.assert_close(model(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert type(model[0]) is getattr(batch_norms, f"BatchNorm{dims}d")
    assert activations == ["identity", "relu", "relu"]
    torch.testing.assert_close(dict(model.state_dict()), dict(theirs.state_dict()))
    assert type(ca.revert(model)[0]) is getattr(nn, f"BatchNorm{dims}d")
    unused = nn.Sequential(lazy())
    assert type(ca.revert(converted(unused))[0]) is lazy


@pytest.mark.parametrize("model", [Residual(), Projected()], ids=["residual", "projected"])
def test_steps_are_pytorchs(model: nn.Module, activations: list[str]) -> None:
    inputs = data(4, 8, 6, 5)
    check_steps(model, inputs)
    assert activations == ["identity"] * 2 * len(inputs)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7}, {"momentum": None}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_pytorchs(
    training: bool, options: dict[str, Any], dims: int, activations: list[str]
) -> None:
    theirs = getattr(nn, f"BatchNorm{dims}d")(8, **options).train(training)
    ours = converted(nn.Sequential(copy.deepcopy(theirs)))
    for given in data(4, 8, *(5,) * dims):
        torch.testing.assert_close(ours(given), theirs(given), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        list(ours.state_dict().values()), list(theirs.state_dict().values()), rtol=1e-5, atol=1e-5
    )
    is_served = options.get("momentum", 0) is not None
    is_served &= training or not options.get("track_running_stats", True)
    assert (len(activations) > 0) == is_served


@pytest.mark.parametrize("name", ["weight", "running_mean", "num_batches_tracked"])
def test_what_is_no_parameter_or_buffer_is_pytorchs(name: str, activations: list[str]) -> None:
    """An attribute may stand before a parameter, and a parameter in place of a buffer."""
    plain = nn.Sequential(nn.BatchNorm2d(8))
    model = converted(copy.deepcopy(plain))
    (x,) = data(4, 8, 6, 5, count=1)
    for one in (model, plain):
        if name == "num_batches_tracked":
            setattr(one[0], name, nn.Parameter(torch.tensor(3), requires_grad=False))
        else:
            vars(one[0])[name] = torch.full((8,), 2.0)
    assert torch.equal(model(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert activations == []


@pytest.mark.parametrize(
    "plain",
    [
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).eval(),
        nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.SiLU()).eval().double(),
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).double(),
        nn.Sequential(nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
    ],
    ids=["evaluation", "without weights", "float64", "cumulative"],
)
def test_what_the_operators_do_not_compute_has_pytorchs_bits(
    plain: nn.Sequential, activations: list[str]
) -> None:
    for buffer in plain.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)
    model = converted(copy.deepcopy(plain))
    for x in data(4, 8, 6, 5):
        found = []
        for one in (model, plain):
            one.zero_grad()
            given = x.to(plain[0].running_var.dtype).requires_grad_()  # type: ignore[arg-type]
            output = one(given)
            output.square().sum().backward()
            gradients = [given.grad, *(parameter.grad for parameter in one.parameters())]
            found.append([output, *gradients, *one.buffers()])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
    assert activations == []


@pytest.mark.parametrize("eps", [0.0, -0.25, math.nan])
@pytest.mark.parametrize("training", [True, False])
def test_an_odd_eps_has_pytorchs_result_or_error(
    training: bool, eps: float, activations: list[str]
) -> None:
    """In evaluation some versions of PyTorch take 0."""
    plain = nn.Sequential(nn.BatchNorm2d(8, eps=eps), nn.ReLU()).train(training)
    (x,) = data(4, 8, 6, 5, count=1)
    model = converted(copy.deepcopy(plain))
    try:
        expected = plain(x)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            model(x)
    else:
        torch.testing.assert_close(model(x), expected, equal_nan=True)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), equal_nan=True)
    assert activations == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 8), torch.float32),
        ((8,), torch.float32),
        ((4, 8, 6), torch.float32),
        ((1, 8, 1, 1), torch.float32),
        ((4, 9, 6, 5), torch.float32),
        ((4, 1, 6, 5), torch.float32),
        ((4, 8, 6, 5), torch.int64),
        ((4, 8, 6, 5), torch.complex64),
        ((0, 8, 6, 5), torch.float32),
        ((4, 8, 0, 5), torch.float32),
    ],
    ids=str,
)
def test_odd_inputs_have_pytorchs_result_or_error(
    shape: tuple[int, ...], dtype: torch.dtype, training: bool, activations: list[str]
) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).train(training)
    model = converted(copy.deepcopy(plain))
    x, outcomes = torch.ones(shape, dtype=dtype), list[Any]()
    for one in (model, plain):
        for _ in range(2):
            try:
                outcomes.append(one(x).tolist())
            except Exception as error:
                outcomes.append((type(error), str(error)))
    assert outcomes[:2] == outcomes[2:]
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert activations == []


@pytest.mark.usefixtures("activations")
class TestLeftToPyTorch:
    def test_transforms(self, activations: list[str]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False)))
        theirs = nn.BatchNorm2d(8, track_running_stats=False)
        (x,) = data(4, 8, 6, 5, count=1)

        def loss(module: nn.Module) -> Tensor:
            gradient: Tensor = torch.func.grad(lambda x: module(x).sin().sum())(x)
            return gradient

        torch.testing.assert_close(loss(norm), loss(theirs))
        tangent = torch.func.jvp(norm, (x,), (x,))[1]
        torch.testing.assert_close(tangent, torch.func.jvp(theirs, (x,), (x,))[1])
        assert activations == []

    def test_modes_see_pytorchs_operators(self, activations: list[str]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8)))
        with Calls() as calls:
            norm(torch.randn(4, 8, 6, 5))
        assert "aten::native_batch_norm" in calls.names
        assert activations == []


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "activation",
    [
        *(nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.GELU()),
        nn.LeakyReLU(0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_second_derivatives_are_pytorchs(
    activation: nn.Module, affine: bool, activations: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8, affine=affine), activation)
    if affine:
        nn.init.normal_(model[0].weight)
        nn.init.normal_(model[0].bias)
    x = torch.randn(4, 8, 6, 5)
    expected = penalties(copy.deepcopy(model), x)
    found = penalties(converted(model), x)
    assert len(activations) == 1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_where_pytorch_computes_more_than_it_is_asked_for(
    affine: bool, activations: list[str]
) -> None:
    """Its kernel for matrices on a GPU also returns gradients of a weight that there is not."""

    def backward(grad: Tensor, input: Tensor, weight: Any, *rest: Any) -> tuple[Tensor, ...]:
        mean, inv_std = rest[2], rest[3]
        normal = (input - mean) * inv_std
        scale = inv_std if weight is None else inv_std * weight
        of_weight, of_bias = (grad * normal).sum(0), grad.sum(0)
        count = input.shape[0]
        return scale * (grad - of_bias / count - normal * of_weight / count), of_weight, of_bias

    plain = nn.BatchNorm1d(6, affine=affine)
    model = converted(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(32, 6)

    def second(norm: nn.Module) -> Tensor:
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(norm(given).sin().sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)[0]

    expected = second(plain)
    library = torch.library.Library("aten", "IMPL")
    library.impl("native_batch_norm_backward", backward, "CPU", allow_override=True)
    try:
        found = second(model)
    finally:
        library._destroy()
        torch.ops.aten.native_batch_norm_backward.default._dispatch_cache.clear()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert activations == ["identity"]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets after a test the classes that it registers."""
    monkeypatch.setattr(batch_norms, "_tails", {})


class NormAct(nn.BatchNorm2d):
    """A user's class that holds a norm and an activation."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.act(self.drop(super().forward(input)))
        return result


ACTIVATIONS: dict[str, nn.Module] = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "silu": nn.SiLU(inplace=True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "hardswish": nn.Hardswish(inplace=True),
    "leaky_relu(0.01)": nn.LeakyReLU(inplace=True),
    "leaky_relu(0.2)": nn.LeakyReLU(0.2),
    "sigmoid": nn.Sigmoid(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_sequence_computes_norm_and_activation_at_once(name: str, activations: list[str]) -> None:
    layer = conv(8, 8)
    check_steps(nn.Sequential(layer, nn.BatchNorm2d(8), ACTIVATIONS[name]), data(4, 8, 6, 5))
    assert activations == [name] * 3


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_class_that_is_registered(name: str, activations: list[str]) -> None:
    ca.register_norm_act(NormAct, tail=lambda module: (module.drop, module.act))
    check_steps(nn.Sequential(conv(8, 8), NormAct(8, ACTIVATIONS[name])), data(4, 8, 6, 5))
    assert activations == [name] * 3


def hooked(model: nn.Sequential, which: str, seen: list[Tensor]) -> None:
    """Lets something see what is between a norm and its activation."""
    norm, activation = model[1], model[2]
    if which == "forward hook":
        norm.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    elif which == "pre-hook":
        activation.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    elif which == "backward hook":
        activation.register_full_backward_hook(lambda module, given, of: seen.append(given[0]))
    elif which == "backward pre-hook":
        norm.register_full_backward_pre_hook(lambda module, of: seen.append(of[0]))
    else:
        forward = activation.forward
        activation.forward = lambda x: (seen.append(x.clone()), forward(x))[1]


@pytest.mark.parametrize(
    "which", ["forward hook", "pre-hook", "backward hook", "backward pre-hook", "forward"]
)
def test_what_is_seen_between_them_is_pytorchs(which: str, activations: list[str]) -> None:
    model = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())
    theirs, seen, expected = copy.deepcopy(model), list[Tensor](), list[Tensor]()
    hooked(converted(model), which, seen)  # type: ignore[arg-type]
    hooked(theirs, which, expected)
    (x,) = data(4, 8, 6, 5, count=1)
    for one in (model, theirs):
        one(x).square().sum().backward()
    assert activations == ["identity"]
    assert len(seen) == len(expected) == 1
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [0, 1])
def test_a_compiled_module_of_a_pair_is_called(
    place: int, activations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.nn.Module.compile`` replaces the call of one module."""
    model: Any = converted(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    called: list[Any] = []

    def compile(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Not every version of PyTorch compiles an activation of its own."""
        return lambda *args: (called.append(model[place]), call(*args))[1]

    monkeypatch.setattr(torch, "compile", compile)
    model[place].compile()
    (x,) = data(4, 8, 6, 5, count=1)
    torch.testing.assert_close(model(x), nn.BatchNorm2d(8)(x).relu(), rtol=1e-4, atol=1e-5)
    assert called == [model[place]]
    assert activations == ["identity"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_changes_nothing(device: str, activations: list[str]) -> None:
    """PyTorch has a mode of functions for it."""
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    inputs, names = data(4, 8, 6, 5), list[str]()

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with torch.device(device):
        check_steps(model, inputs)
        assert activations == ["relu"] * 3
        with Seen():
            model(inputs[0])
    assert "batch_norm" in names
    assert activations == ["relu"] * 3


def test_shared_modules(activations: list[str]) -> None:
    """A norm that two layers share updates its statistics twice; an activation has no state."""
    norm, relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    first, second = conv(8, 8), conv(8, 8)
    blocks = (nn.Sequential(first, norm, relu), nn.Sequential(second, norm, relu))
    check_steps(nn.Sequential(*blocks), data(4, 8, 6, 5))
    assert activations == ["relu"] * 6


def test_a_frozen_norm_in_a_training_model(activations: list[str]) -> None:
    model = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())
    nn.init.normal_(model[1].running_mean)  # type: ignore[arg-type]
    model[1].eval()
    check_steps(model, data(4, 8, 6, 5))
    assert activations == []
    assert model[1].num_batches_tracked == 0


def test_norms_become_synchronised_ones_later() -> None:
    model = converted(nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(synchronised[1]) is nn.SyncBatchNorm
    x = torch.randn(4, 8, 6, 5)
    theirs = ca.revert(copy.deepcopy(synchronised))
    torch.testing.assert_close(synchronised.eval()(x), theirs.eval()(x))


def fused_by_fx(model: nn.Module) -> nn.Module:
    optimization = importlib.import_module("torch.fx.experimental.optimization")
    fused: nn.Module = optimization.fuse(model)
    return fused


def fused_by_quantization(model: nn.Module) -> nn.Module:
    fused: nn.Module = torch.ao.quantization.fuse_modules(model, [["0", "1"]])
    return fused


def fused_by_hand(model: Any) -> nn.Module:
    return nn.Sequential(torch.nn.utils.fuse_conv_bn_eval(model[0], model[1]), *model[2:])


FUSIONS = [fused_by_fx, fused_by_quantization, fused_by_hand]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("reverts", [False, True])
def test_tools_that_fuse_norms_in_evaluation(reverts: bool, fuse: Any) -> None:
    """They give PyTorch's numbers, or an error. If they look at exact types, they fuse nothing."""
    model = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU())
    nn.init.normal_(model[1].running_mean)
    theirs, (x,) = copy.deepcopy(model).eval(), data(4, 8, 6, 5, count=1)
    converted(model).eval()
    if reverts:
        ca.revert(model)
    elif fuse is fused_by_quantization:
        with pytest.raises(Exception, match=r"(?i)fuse"):  # of a class that differs by version
            fuse(model)
        return
    fused = fuse(model)
    torch.testing.assert_close(fused(x), theirs(x), rtol=1e-4, atol=1e-4)
    is_fused = not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert is_fused == (reverts or fuse is fused_by_hand)


def test_a_norm_with_a_parametrization(activations: list[str]) -> None:
    class Positive(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return nn.functional.softplus(weight)

    plain, (x,) = nn.Sequential(nn.BatchNorm2d(8)), data(4, 8, 6, 5, count=1)
    first, later = copy.deepcopy(plain), copy.deepcopy(plain)
    torch.nn.utils.parametrize.register_parametrization(plain[0], "weight", Positive())
    torch.nn.utils.parametrize.register_parametrization(first[0], "weight", Positive())
    converted(first)
    converted(later)
    torch.nn.utils.parametrize.register_parametrization(later[0], "weight", Positive())
    expected = plain(x)
    for one in (first, later):
        torch.testing.assert_close(one(x), expected, rtol=1e-4, atol=1e-5)
    torch.nn.utils.parametrize.remove_parametrizations(later[0], "weight")
    assert type(later[0]) is batch_norms.BatchNorm2d
    assert type(ca.revert(later)[0]) is nn.BatchNorm2d
