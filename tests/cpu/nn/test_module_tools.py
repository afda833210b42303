"""What people do with any of the modules: save, copy, wrap, fuse, trace, compile, transform."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.subprocesses import evaluate
from torch import Tensor, nn

import cudnn_autotune as ca

KINDS = [f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3)]
CLASSES = [*KINDS, *(f"Lazy{kind}" for kind in KINDS)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def theirs(kind: str) -> nn.Module:
    return getattr(nn, kind)(4, 6, 3, padding=1)


@pytest.fixture
def ours(kind: str, theirs: nn.Module) -> Any:
    module = getattr(ca, kind)(
        4, 6, 3, padding=1, sampling="median_of_three", workspace_limit=1 << 20
    )
    module.load_state_dict(theirs.state_dict())
    return module


@pytest.fixture
def input(kind: str) -> Tensor:
    return torch.randn(inputs_shape(kind))


def inputs_shape(kind: str, batch: int = 2) -> tuple[int, ...]:
    """Of an input of four channels."""
    return (batch, 4, 9, 8, 7)[: 2 + int(kind[-2])]


def test_it_is_pytorchs(kind: str, theirs: nn.Module, ours: Any, input: Tensor) -> None:
    assert isinstance(ours, getattr(nn, kind))
    assert repr(getattr(ca, kind)(4, 6, 3, padding=1)) == "cudnn_autotune." + repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    back = getattr(nn, kind)(4, 6, 3, padding=1)
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back(input), theirs(input))
    assert ours.sampling == "median_of_three"
    assert ours.workspace_limit == 1 << 20


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_is_pytorchs_and_ours_after_it(name: str) -> None:
    theirs = list(inspect.signature(getattr(nn, name)).parameters.values())
    cls = getattr(ca, name)
    for with_it in (cls, type("Heir", (cls,), {})):
        ours = list(inspect.signature(with_it).parameters.values())
        assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [
            (p.name, p.kind, p.default) for p in theirs
        ]
        assert [(p.name, p.kind, p.default) for p in ours[len(theirs) :]] == [
            (name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("sampling", "workspace_limit")
        ]

    class Changed(cls):  # type: ignore[misc, valid-type]
        def __init__(self, width: int) -> None:
            super().__init__(width, width, 3)

    assert list(inspect.signature(Changed).parameters) == ["width"]


@pytest.mark.parametrize("name", [name for name in dir(ca.functional) if name.startswith("conv")])
def test_the_signature_of_a_function(name: str) -> None:
    """PyTorch's have none: its order is that of the module's arguments in its documentation."""
    function = getattr(ca.functional, name)
    parameters = list(inspect.signature(function).parameters)
    assert parameters[:5] == ["input", "weight", "bias", "stride", "padding"]
    transposed = ["output_padding", "groups", "dilation"]
    assert parameters[5:-2] == (transposed if "transpose" in name else ["dilation", "groups"])
    assert parameters[-2:] == ["sampling", "workspace_limit"]
    assert function.__doc__.startswith(f"``torch.nn.functional.{name}``")
    assert pickle.loads(pickle.dumps(function)) is function


def test_each_argument_reaches_pytorchs(kind: str) -> None:
    """None like its neighbour: one that is passed in another's place is seen."""
    n = int(kind[-2])
    stride, padding, dilation = (2, 1, 3)[:n], (1, 0, 2)[:n], (1, 2, 4)[:n]
    every: tuple[Any, ...] = (4, 6, (3, 2, 1)[:n], stride, padding)
    if "Transpose" in kind:
        every += ((1, 0, 2)[:n], 2, False, dilation, "zeros", "meta", torch.float64)
    else:
        every += (dilation, 2, False, "circular", "meta", torch.float64)
    theirs = getattr(nn, kind)(*every)
    ours = getattr(ca, kind)(*every, sampling="race", workspace_limit=7)
    policy = ", sampling=race, workspace_limit=7)"
    assert repr(ours) == "cudnn_autotune." + repr(theirs)[:-1] + policy
    assert (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device)
    assert ours.weight.shape == theirs.weight.shape
    lazy_theirs, lazy_ours = (getattr(m, f"Lazy{kind}")(*every[1:]) for m in (nn, ca))
    assert repr(lazy_ours) == "cudnn_autotune." + repr(lazy_theirs)
    assert (lazy_ours.weight.dtype, lazy_ours.weight.device) == (torch.float64, ours.weight.device)


def test_initial_weights_are_pytorchs(kind: str) -> None:
    torch.manual_seed(3)
    theirs = getattr(nn, kind)(4, 6, 3)
    torch.manual_seed(3)
    ours = getattr(ca, kind)(4, 6, 3)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch_save"])
def test_copies_keep_everything(kind: str, ours: Any, input: Tensor, way: str) -> None:
    if way == "deepcopy":
        twin = copy.deepcopy(ours)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(ours))
    else:
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert type(twin) is getattr(ca, kind)
    assert twin is not ours
    assert (twin.sampling, twin.workspace_limit) == (ours.sampling, ours.workspace_limit)
    assert torch.equal(twin(input), ours(input))


def test_lazy(kind: str, input: Tensor) -> None:
    lazy = getattr(ca, f"Lazy{kind}")(6, 3, padding=1, sampling="sample_once")
    assert isinstance(lazy, getattr(nn, f"Lazy{kind}"))
    output = lazy(input)
    assert type(lazy) is getattr(ca, kind)
    assert lazy.in_channels == 4
    assert lazy.sampling == "sample_once"
    theirs = getattr(nn, kind)(4, 6, 3, padding=1)
    theirs.load_state_dict(lazy.state_dict())
    assert torch.equal(output, theirs(input))
    loaded = getattr(ca, f"Lazy{kind}")(6, 3, padding=1)
    loaded.load_state_dict(theirs.state_dict())
    assert torch.equal(loaded(input), output)


@pytest.mark.basic(3)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_aot_eager(kind: str, theirs: nn.Module, ours: Any, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 3, 5):
        input = torch.randn(inputs_shape(kind, batch))
        outputs = [module(input) for module in (theirs, compiled)]
        assert torch.equal(outputs[1], outputs[0])
        grads = [
            torch.autograd.grad(output.square().sum(), list(module.parameters()))
            for output, module in zip(outputs, (theirs, ours), strict=True)
        ]
        for expected, actual in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected)


def test_export_with_a_dynamic_batch(kind: str, ours: Any, input: Tensor, tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(ours, (input,), dynamic_shapes=({0: batch},))
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    other = torch.randn(inputs_shape(kind, 7))
    torch.testing.assert_close(loaded(other), ours(other))


@pytest.mark.parametrize("name", CLASSES)
def test_settings_are_checked_at_construction(name: str) -> None:
    arguments = (6, 3) if name.startswith("Lazy") else (4, 6, 3)
    with pytest.raises(ValueError, match=r"sampling.*till_stable"):
        getattr(ca, name)(*arguments, sampling="fastest")
    with pytest.raises(ValueError, match="workspace_limit"):
        getattr(ca, name)(*arguments, workspace_limit=-1)


def test_a_mode_that_is_first_asked_for_compiles_nothing_again() -> None:
    """A graph is guarded by the names of modes, not by which of them were imported."""
    code = (
        "import torch, cudnn_autotune as ca\n"
        "torch._dynamo.config.error_on_recompile = True\n"
        "layer = ca.Conv2d(3, 4, 3, sampling='till_stable')\n"
        "compiled = torch.compile(layer, fullgraph=True, backend='eager')\n"
        "x = torch.randn(1, 3, 8, 8)\n"
        "compiled(x)\n"
        "[ca.sampling.get(name) for name in ca.sampling.names()]\n"
        "print(torch.equal(compiled(x), layer(x)))"
    )
    assert evaluate(code).strip() == "True"
