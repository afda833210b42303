"""What people do with modules: save, copy, wrap, fuse, trace, compile, transform."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.utils import fuse_conv_bn_eval, parametrizations, parametrize

import cudnn_autotune as ca


@pytest.fixture
def theirs() -> nn.Conv2d:
    return nn.Conv2d(4, 6, 3, padding=1)


@pytest.fixture
def ours(theirs: nn.Conv2d) -> ca.Conv2d:
    module = ca.Conv2d(4, 6, 3, padding=1, sampling="median_of_three", workspace_limit=1 << 20)
    module.load_state_dict(theirs.state_dict())
    return module


@pytest.fixture
def input() -> Tensor:
    return torch.randn(2, 4, 9, 8)


def test_it_is_a_conv2d(ours: ca.Conv2d) -> None:
    assert isinstance(ours, nn.Conv2d)
    assert ours.sampling == "median_of_three"
    assert ours.workspace_limit == 1 << 20


@pytest.mark.parametrize("name", ["Conv2d", "LazyConv2d"])
def test_the_signature_is_pytorchs_and_ours_after_it(name: str) -> None:
    theirs = list(inspect.signature(getattr(nn, name)).parameters.values())
    ours = list(inspect.signature(getattr(ca, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert [(p.name, p.kind, p.default) for p in ours[len(theirs) :]] == [
        (name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("sampling", "workspace_limit")
    ]


def test_each_argument_reaches_pytorchs() -> None:
    """None like its neighbour: one that is passed in another's place is seen."""
    every = (4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, False, "circular", "meta", torch.float64)
    theirs, ours = nn.Conv2d(*every), ca.Conv2d(*every, sampling="race", workspace_limit=7)
    policy = ", sampling=race, workspace_limit=7)"
    assert repr(ours) == "cudnn_autotune." + repr(theirs)[:-1] + policy
    assert (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device)
    assert ours.weight.shape == theirs.weight.shape
    lazy_theirs, lazy_ours = nn.LazyConv2d(*every[1:]), ca.LazyConv2d(*every[1:])
    assert repr(lazy_ours) == "cudnn_autotune." + repr(lazy_theirs)
    assert (lazy_ours.weight.dtype, lazy_ours.weight.device) == (torch.float64, ours.weight.device)


def test_skip_init(input: Tensor) -> None:
    module = nn.utils.skip_init(ca.Conv2d, 4, 6, 3, stride=2, sampling="sample_once")
    assert (type(module), module.sampling, module.stride) == (ca.Conv2d, "sample_once", (2, 2))
    assert not any(p.is_meta for p in module.parameters())
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    assert torch.equal(module(input), nn.functional.conv2d(input, torch.ones(6, 4, 3, 3), None, 2))


def test_initial_weights_are_pytorchs() -> None:
    torch.manual_seed(3)
    theirs = nn.Conv2d(4, 6, 3)
    torch.manual_seed(3)
    ours = ca.Conv2d(4, 6, 3)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_repr_starts_as_pytorchs_and_shows_what_is_ours(theirs: nn.Conv2d, ours: ca.Conv2d) -> None:
    plain = ca.Conv2d(4, 6, 3, padding=1)
    assert repr(plain) == "cudnn_autotune." + repr(theirs)
    assert repr(ours).startswith(repr(plain)[:-1])
    assert "median_of_three" in repr(ours)
    assert str(1 << 20) in repr(ours)


def test_state_dict_both_ways(theirs: nn.Conv2d, ours: ca.Conv2d, input: Tensor) -> None:
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    back = nn.Conv2d(4, 6, 3, padding=1)
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back(input), theirs(input))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch_save"])
def test_copies_keep_everything(ours: ca.Conv2d, input: Tensor, way: str) -> None:
    if way == "deepcopy":
        twin = copy.deepcopy(ours)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(ours))
    else:
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert type(twin) is ca.Conv2d
    assert twin is not ours
    assert (twin.sampling, twin.workspace_limit) == (ours.sampling, ours.workspace_limit)
    assert torch.equal(twin(input), ours(input))


def test_lazy(input: Tensor) -> None:
    lazy = ca.LazyConv2d(6, 3, padding=1, sampling="sample_once")
    assert isinstance(lazy, nn.LazyConv2d)
    output = lazy(input)
    assert type(lazy) is ca.Conv2d
    assert lazy.in_channels == 4
    assert lazy.sampling == "sample_once"
    assert torch.equal(output, nn.functional.conv2d(input, lazy.weight, lazy.bias, padding=1))


def test_lazy_loads_a_state_dict(theirs: nn.Conv2d, input: Tensor) -> None:
    lazy = ca.LazyConv2d(6, 3, padding=1)
    lazy.load_state_dict(theirs.state_dict())
    assert torch.equal(lazy(input), theirs(input))


def test_weight_norm_parametrization(theirs: nn.Conv2d, ours: ca.Conv2d, input: Tensor) -> None:
    for module in (theirs, ours):
        parametrizations.weight_norm(module)
        assert parametrize.is_parametrized(module, "weight")
    assert torch.equal(ours(input), theirs(input))
    assert isinstance(ours, ca.Conv2d)
    ours(input).sum().backward()
    theirs(input).sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_meta_device() -> None:
    module = ca.Conv2d(4, 6, 3, stride=2, device="meta")
    output = module(torch.empty(2, 4, 9, 8, device="meta"))
    assert output.is_meta
    assert output.shape == (2, 6, 4, 3)
    real = module.to_empty(device="cpu")
    real.reset_parameters()
    assert torch.isfinite(real(torch.randn(2, 4, 9, 8))).all()


def test_fusing_with_batch_norm(theirs: nn.Conv2d, ours: ca.Conv2d, input: Tensor) -> None:
    norm = nn.BatchNorm2d(6)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    fused = fuse_conv_bn_eval(ours.eval(), norm.eval())
    assert type(fused) is ca.Conv2d
    assert fused.sampling == ours.sampling
    expected = fuse_conv_bn_eval(theirs.eval(), norm)
    assert torch.equal(fused(input), expected(input))


def test_functional_call(theirs: nn.Conv2d, ours: ca.Conv2d, input: Tensor) -> None:
    other = {name: torch.randn_like(p) for name, p in theirs.named_parameters()}
    assert torch.equal(
        functional_call(ours, other, (input,)), functional_call(theirs, other, (input,))
    )


def test_func_transforms(theirs: nn.Conv2d, ours: ca.Conv2d, input: Tensor) -> None:
    tangent = torch.randn_like(input)
    results = []
    for module in (theirs, ours):

        def loss(x: Tensor, module: nn.Module = module) -> Tensor:
            return module(x).sin().sum()

        results.append(
            [
                grad(loss)(input),
                *jvp(loss, (input,), (tangent,)),
                vmap(grad(loss))(input),
                vmap(module)(input.unsqueeze(1)),
                hessian(loss)(input[:1, :, :4, :4]),
            ]
        )
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.norm() > 0


def test_per_sample_gradients(ours: ca.Conv2d, input: Tensor) -> None:
    parameters = dict(ours.named_parameters())

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(ours, p, (x.unsqueeze(0),)).square().sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, input)
    ours(input).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(per_sample[name].sum(0), parameter.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_aot_eager(theirs: nn.Conv2d, ours: ca.Conv2d, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 3, 5):
        input = torch.randn(batch, 4, 9, 8)
        outputs = [module(input) for module in (theirs, compiled)]
        assert torch.equal(outputs[1], outputs[0])
        grads = [
            torch.autograd.grad(output.square().sum(), list(module.parameters()))
            for output, module in zip(outputs, (theirs, ours), strict=True)
        ]
        for expected, actual in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected)


def test_export_with_a_dynamic_batch(ours: ca.Conv2d, input: Tensor, tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(ours, (input,), dynamic_shapes=({0: batch},))
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    other = torch.randn(7, 4, 9, 8)
    torch.testing.assert_close(loaded(other), ours(other))


def test_symbolic_trace(ours: ca.Conv2d, input: Tensor) -> None:
    model = nn.Sequential(ours, nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(input), model(input))
    # Modules outside torch.nn are traced through: the search must be in the graph, as it may yet
    # be moved to a GPU.
    assert "median_of_three" in traced.code


def test_settings_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"sampling.*till_stable"):
        ca.Conv2d(4, 6, 3, sampling="fastest")
    with pytest.raises(ValueError, match="workspace_limit"):
        ca.Conv2d(4, 6, 3, workspace_limit=-1)
