"""``convert(model, norms=True)``: batch norms that train by this package's operators.

On a CPU they do so only where a test asks for it.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from norm_models import Projected, Residual, data, errors, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_autotune as ca
from cudnn_autotune.nn import batch_norms


class Calls(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Norms on a CPU take the way of those on a GPU. Returns a list with how many batches did."""
    served = [0]
    operator = batch_norms._batch_norm_act

    def counted(*arguments: Any) -> Any:
        served[0] += 1
        return operator(*arguments)

    monkeypatch.setattr(batch_norms, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(batch_norms, "_batch_norm_act", counted)
    return served


def converted(model: nn.Module) -> nn.Module:
    return ca.convert(model, norms=True)


def test_classes_are_swapped_and_given_back() -> None:
    model = Residual()
    before, state = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    assert type(ca.convert(model).norm) is nn.BatchNorm2d
    converted(model)
    assert type(model.norm) is batch_norms.BatchNorm2d
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert repr(model.norm).startswith("cudnn_autotune.BatchNorm2d(8, eps=1e-05")
    assert ca.conversion(model).served["norm"] == "BatchNorm2d"
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert type(pickle.loads(pickle.dumps(model)).norm) is batch_norms.BatchNorm2d
    assert type(copy.deepcopy(model).norm) is batch_norms.BatchNorm2d
    ca.revert(model)
    assert [type(module) for module in model.modules()] == before


def test_a_model_that_has_nothing_but_norms() -> None:
    model = converted(nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4)))
    assert ca.conversion(model).served == {"0": "BatchNorm1d"}
    assert type(model[1]) is nn.SyncBatchNorm  # type: ignore[index]


def test_a_subclass_and_a_forward_of_the_module_stay() -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Own(4), nn.BatchNorm2d(4))
    model[1].forward = lambda input: input  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="has no convolution"):
        converted(model)
    assert [type(module) for module in model] == [Own, nn.BatchNorm2d]


def test_what_is_no_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="norms must be True or False, got 'yes'"):
        ca.convert(Residual(), norms="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [Residual(), Projected()], ids=["residual", "projected"])
def test_steps_are_pytorchs(model: nn.Module, like_a_gpu: list[int]) -> None:
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    inputs = data(4, 8, 6, 5)
    steps = train(converted(model), inputs)
    expected = train(exact, [one.double() for one in inputs])
    ours, eager = errors(steps, expected), errors(train(theirs, inputs), expected)
    for kind, error in ours.items():
        assert error <= 3 * eager[kind] + 2e-6, (kind, ours, eager)
    assert like_a_gpu == [2 * len(inputs)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7}, {"momentum": None}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_pytorchs(
    training: bool, options: dict[str, Any], dims: int, like_a_gpu: list[int]
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
    assert (like_a_gpu[0] > 0) == is_served


def test_one_value_a_channel_is_pytorchs_error(like_a_gpu: list[int]) -> None:
    norm, theirs = converted(nn.Sequential(nn.BatchNorm2d(8))), nn.BatchNorm2d(8)
    texts = []
    for module in (norm, theirs):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as error:
            module(torch.randn(1, 8, 1, 1))
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.randn(4, 8))


@pytest.mark.usefixtures("like_a_gpu")
class TestLeftToPyTorch:
    def test_double_precision_and_empty_batches(self, like_a_gpu: list[int]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8))).double()
        theirs = nn.BatchNorm2d(8).double()
        (x,) = data(4, 8, 6, 5, count=1)
        torch.testing.assert_close(norm(x.double()), theirs(x.double()))
        assert like_a_gpu == [0]

    def test_transforms(self, like_a_gpu: list[int]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False)))
        theirs = nn.BatchNorm2d(8, track_running_stats=False)
        (x,) = data(4, 8, 6, 5, count=1)

        def loss(module: nn.Module) -> Tensor:
            gradient: Tensor = torch.func.grad(lambda x: module(x).sin().sum())(x)
            return gradient

        torch.testing.assert_close(loss(norm), loss(theirs))
        tangent = torch.func.jvp(norm, (x,), (x,))[1]
        torch.testing.assert_close(tangent, torch.func.jvp(theirs, (x,), (x,))[1])
        assert like_a_gpu == [0]

    def test_modes_see_pytorchs_operators(self, like_a_gpu: list[int]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8)))
        with Calls() as calls:
            norm(torch.randn(4, 8, 6, 5))
        assert "aten::native_batch_norm" in calls.names
        assert like_a_gpu == [0]

    def test_a_tracer(self, like_a_gpu: list[int]) -> None:
        norm = converted(nn.Sequential(nn.BatchNorm2d(8)))
        traced = torch.jit.trace(norm, torch.randn(4, 8, 6, 5), check_trace=False)
        assert "aten::batch_norm" in str(traced.inlined_graph)
        assert like_a_gpu == [0]

    def test_a_compiler_sees_pytorchs_function(self, like_a_gpu: list[int]) -> None:
        torch._dynamo.reset()
        seen: list[Any] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            seen.extend(node.target for node in graph.graph.nodes)
            return graph

        model = converted(Residual())
        torch.compile(model, backend=backend)(torch.randn(4, 8, 6, 5))
        assert seen.count(nn.functional.batch_norm) == 2
        assert like_a_gpu == [0]


def test_a_second_derivative_is_an_error(like_a_gpu: list[int]) -> None:
    norm = converted(nn.Sequential(nn.BatchNorm2d(8)))
    x = torch.randn(4, 8, 6, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="has no derivative"):
        gradient.sum().backward()
    assert like_a_gpu == [1]


@pytest.mark.usefixtures("like_a_gpu")
def test_a_tracer_of_fx_takes_the_module_for_one_call() -> None:
    model = converted(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    traced = torch.fx.symbolic_trace(model)
    modules = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert modules == ["1"]
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(traced(x), copy.deepcopy(model)(x))


@pytest.mark.usefixtures("like_a_gpu")
def test_what_pytorch_refuses_is_refused() -> None:
    wrong = converted(nn.Sequential(nn.BatchNorm2d(5, affine=False)))
    with pytest.raises(RuntimeError, match="running_mean should contain 1 elements not 5"):
        wrong(torch.randn(2, 1, 4, 4))
    assert wrong[0].running_mean.tolist() == [0.0] * 5
