"""``convert(memory_format=...)``: which layout a model gets, and that measuring leaves no trace."""

from __future__ import annotations

import copy
import io
import logging
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.served_on_cpu import served_on_cpu
from support.models.made import Made
from torch import Tensor, nn
from torch._inductor.cudagraph_trees import MarkStepBox

import cudnn_autotune as ca
from cudnn_autotune.models import memory_format as layouts

CONTIGUOUS, LAST, LAST_3D = torch.contiguous_format, torch.channels_last, torch.channels_last_3d


class Net(nn.Module):
    """Weights of 4 and 5 dimensions, statistics, dropout, and a kernel of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)
        self.volume = nn.Conv3d(1, 2, 3, padding=1)
        self.head = nn.Linear(2, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = self.dropout(self.norm(self.pointwise(self.stem(x)))) * scale
        volume = self.volume(y.unsqueeze(1))
        return {"features": y, "scores": [self.head(volume.mean((2, 3, 4)))], "name": "net"}


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 6, 7)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """The clock says that channels_last takes ``request.param`` ms, and contiguous 1 ms.

    The list gets the names of the programs that were to be timed; each is run once.
    """
    timed: list[str] = []

    def time_in_turns(
        programs: dict[str, Any], inputs: Any, on_gpu: bool, with_host: bool
    ) -> dict[str, float]:
        assert (inputs, on_gpu) == ((), False)
        for name, program in programs.items():
            program()
            timed.append(name)
        return {"contiguous": 1.0, "channels_last": request.param}

    monkeypatch.setattr(layouts, "time_in_turns", time_in_turns)
    return timed


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in model.state_dict().items()}


def is_laid_out(model: nn.Module, memory_format: torch.memory_format) -> bool:
    """Whether all weights have the strides of this layout, those of kernels of size 1 too."""
    wanted = {4: memory_format, 5: LAST_3D if memory_format == LAST else CONTIGUOUS}
    return all(
        p.stride() == torch.empty(p.shape, memory_format=wanted[p.dim()]).stride()
        for p in model.parameters()
        if p.dim() in wanted
    )


@pytest.mark.parametrize("given", [LAST, LAST_3D])
def test_a_layout_by_name(model: Net, x: Tensor, given: torch.memory_format) -> None:
    model(x)["features"].sum().backward()
    before, parameters = copy.deepcopy(model).eval(), list(model.parameters())
    gradients = [p.grad for p in parameters]
    ca.convert(model, memory_format=given)
    assert is_laid_out(model, LAST)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or gradient.stride() == parameter.stride()
    expected, found = before(x), model.eval()(x)
    torch.testing.assert_close(found["scores"], expected["scores"])
    assert found["features"].is_contiguous(memory_format=LAST)
    ca.convert(model, memory_format=CONTIGUOUS)
    assert is_laid_out(model, CONTIGUOUS)
    assert ca.conversion(model).memory_format is None, "nothing was measured"


def test_revert_keeps_the_layout(model: Net) -> None:
    ca.revert(ca.convert(model, memory_format=LAST))
    assert is_laid_out(model, LAST)
    assert type(model.stem) is nn.Conv2d


def test_steps_are_not_marked_for_the_caller(model: Net, x: Tensor) -> None:
    """After a mark, the CUDA graphs of programs would begin no step by themselves."""
    ca.convert(model, memory_format="auto", example_input=x)
    assert MarkStepBox.mark_step_counter == 0


@pytest.mark.parametrize("training", [False, True])
def test_measuring_leaves_no_trace(model: Net, x: Tensor, training: bool) -> None:
    """By the real clock: the layout is open, the rest is not."""
    model.train(training)
    model.norm.train(not training)  # not all modules need be in the mode of the model
    model(x)["features"].sum().backward()
    twin = copy.deepcopy(model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    input, state = x.clone(), torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    ca.convert(model, memory_format="auto", example_input=x)
    choice = ca.conversion(model).memory_format
    assert choice.times_ms.keys() == {CONTIGUOUS, LAST}
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__)
    assert is_laid_out(model, choice.chosen)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, input)
    assert [m.training for m in model.modules()] == modes
    for (name, tensor), expected in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_part_is_measured_without_a_trace(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), torch.jit.script(nn.BatchNorm2d(4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ca.convert(model, memory_format="auto", example_input=x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model(x)
    assert model.state_dict()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("clock", [0.9, 1.1], indirect=True)
@pytest.mark.parametrize("start", [CONTIGUOUS, LAST])
def test_the_faster_is_taken(
    model: Net,
    x: Tensor,
    clock: list[str],
    start: torch.memory_format,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    layouts.apply(model, start)
    last_ms = request.node.callspec.params["clock"]
    with caplog.at_level(logging.INFO, logger="cudnn_autotune"):
        ca.convert(model, memory_format="auto", example_input=x)
    assert clock == ["contiguous", "channels_last"]
    choice = ca.conversion(model).memory_format
    assert choice.times_ms == {CONTIGUOUS: 1.0, LAST: last_ms}
    assert choice.chosen == (LAST if last_ms < 1 else CONTIGUOUS)
    assert is_laid_out(model, choice.chosen)
    assert f"channels_last {last_ms:.3f} ms a step" in caplog.text


def of_its_layout(contiguous: Callable[[Tensor], Any], other: Callable[[Tensor], Any]) -> Made:
    """A convolution whose output becomes another one in another layout."""
    return Made(
        lambda model, x: (contiguous if (y := model.conv(x)).is_contiguous() else other)(y),
        conv=nn.Conv2d(3, 4, 3),
    )


def as_it_lies(y: Tensor) -> Tensor:
    return torch.as_strided(y, (y.numel(),), (1,)).cumsum(0)


def same(y: Tensor) -> Tensor:
    return y


@pytest.mark.parametrize(
    ("contiguous", "other", "reason"),
    [
        (as_it_lies, as_it_lies, "in channels_last output 0 has a relative error of"),
        (
            *[lambda y: y.view(len(y), -1)] * 2,
            "channels_last fails: RuntimeError: view size is not compatible",
        ),
        (
            *[lambda y: (y.argmax(), "a text")] * 2,
            "its outputs have no floating-point tensor that could be compared",
        ),
        (
            *(same, lambda y: y[:1]),
            r"in channels_last output 0 is \(1, 4, 4, 5\) of torch.float32, expected",
        ),
        (same, lambda y: y / 0, "in channels_last output 0 is not finite in other places"),
    ],
    ids=["as it lies", "views", "texts", "shapes", "overflows"],
)
def test_a_wrong_layout_is_refused(
    contiguous: Callable[[Tensor], Any], other: Callable[[Tensor], Any], reason: str, x: Tensor
) -> None:
    model = of_its_layout(contiguous, other)
    with pytest.warns(UserWarning, match=f"memory_format='auto' stays contiguous: {reason}"):
        ca.convert(model, memory_format="auto", example_input=x)
    choice = ca.conversion(model).memory_format
    assert re.match(reason, choice.reason)
    assert (choice.chosen, choice.times_ms) == (CONTIGUOUS, {})
    assert is_laid_out(model, CONTIGUOUS)
    assert type(model.conv) is ca.Conv2d


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_the_tolerance_is_that_of_the_type(x: Tensor, clock: list[str]) -> None:
    """An error of 5 % is rounding for bfloat16, and not for float32."""
    off = partial(of_its_layout, same, lambda y: y * 1.05)

    with pytest.warns(UserWarning, match=r"a relative error of 0\.05, allowed is 0\.01"):
        ca.convert(off(), memory_format="auto", example_input=x)
    model = ca.convert(off().bfloat16(), memory_format="auto", example_input=x.bfloat16())
    assert is_laid_out(model, LAST)
    model = off()
    with torch.autocast("cpu", torch.bfloat16):
        ca.convert(model, memory_format="auto", example_input=x)
    assert is_laid_out(model, LAST)


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_rounding_that_the_model_amplifies_is_allowed(x: Tensor, clock: list[str]) -> None:
    def amplified(model: Any, x: Tensor, factor: float) -> Tensor:
        y: Tensor = model.stem(x)
        rounded = y if y.is_contiguous() else y * (1 + 2**-12)
        return (factor * rounded).sin()

    def amplifies() -> Made:
        return Made(amplified, stem=nn.Conv2d(3, 4, 3))

    with pytest.warns(UserWarning, match="stays contiguous: in channels_last output 0 has a"):
        ca.convert(amplifies(), memory_format="auto", example_input=(x, 1e6))
    model = ca.convert(amplifies(), memory_format="auto", example_input=(x, 300.0))
    assert ca.conversion(model).memory_format.reason == "the faster"


class Draws(nn.Module):
    """Draws random numbers, or writes into its input or a buffer, in eval mode too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.register_buffer("calls", torch.ones(3, 1, 1))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "buffer":
            self.calls += 1
            x = x * self.calls
        if self.kind == "input":
            x.mul_(2)
        y: Tensor = self.stem(x).relu()
        drawn = {
            "dropout": lambda: F.dropout(y),
            "channel dropout": lambda: F.dropout2d(y),
            "noise": lambda: y + torch.randn_like(y),
            "noise of its own": lambda: y + torch.randn(y.shape),
            "mask": lambda: y * torch.empty_like(y).bernoulli_(0.5),
            "depth": lambda: y * torch.empty(len(y), 1, 1, 1).bernoulli_(0.5),
            "python": lambda: y * random.random(),
            "places": lambda: y[:, torch.randperm(8)],
            "slopes": lambda: F.rrelu(y - 1, training=True),
        }
        return self.head(drawn.get(self.kind, lambda: y)())  # type: ignore[no-any-return]


@pytest.mark.parametrize("clock", [0.5], indirect=True)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        *("buffer", "input", "dropout", "channel dropout", "noise", "noise of its own", "mask"),
        *("depth", "python", "places", "slopes"),
    ],
)
def test_random_numbers_and_writes_are_no_difference(
    kind: str, training: bool, x: Tensor, clock: list[str]
) -> None:
    """Each run has the same ones; afterwards the caller's are what they were."""
    model = Draws(kind).train(training)
    input, state, python = x.clone(), torch.get_rng_state(), random.getstate()
    ca.convert(model, memory_format="auto", example_input=x)
    choice = ca.conversion(model).memory_format
    assert (choice.chosen, choice.reason) == (LAST, "the faster")
    assert torch.equal(x, input)
    assert torch.equal(model.calls, torch.ones(3, 1, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


class OneDimensional(nn.Module):
    """Layers of 1-d convolutions of all kinds, and a weight of 3 dimensions that is none of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(5, 8, 5, padding=2)
        self.depthwise = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.pointwise = nn.Conv1d(8, 6, 1, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.ConvTranspose1d(6, 4, 4, 2, 1)
        self.table = nn.Parameter(torch.randn(1, 4, 22))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(F.leaky_relu(self.stem(x), 0.1)) + self.depthwise.bias[:, None]
        y = self.up(self.norm(self.pointwise(y)).relu())
        return torch.tanh(y) + self.table


OF_1D = ("stem", "depthwise", "pointwise", "up")


def images_strides(weight: Tensor) -> tuple[int, ...]:
    _, channels, taps = weight.shape
    return (channels * taps, 1, channels)


def are_1d_weights_last(model: nn.Module) -> list[bool]:
    weights = [model.get_submodule(name).weight for name in OF_1D]
    return [weight.stride() == images_strides(weight) for weight in weights]


@pytest.mark.basic(1)
@pytest.mark.parametrize("given", [LAST, LAST_3D])
def test_weights_of_1d_convolutions(given: torch.memory_format) -> None:
    """They are laid out as images of height 1, with their gradients; a table is left alone."""
    model, x = OneDimensional(), torch.randn(2, 5, 11)
    model(x).sum().backward()
    before = copy.deepcopy(model)
    parameters, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
    ca.convert(model, memory_format=given)
    assert are_1d_weights_last(model) == [True] * 4
    assert model.table.is_contiguous()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient.stride() == parameter.stride()
    for (name, expected), found in zip(
        before.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    torch.testing.assert_close(model.eval()(x), before.eval()(x))
    ca.convert(model, memory_format=CONTIGUOUS)
    for (name, expected), found in zip(before.named_parameters(), model.parameters(), strict=True):
        assert found.stride() == expected.stride(), name


def test_the_layout_of_1d_weights_is_kept() -> None:
    """By copies, casts, state dicts, pickles and optimizers, and by ``revert``."""
    model = ca.convert(OneDimensional(), memory_format=LAST)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(OneDimensional().state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2, 5, 11)
    model(x).sum().backward()
    optimizer.step()
    for name in OF_1D:
        weight = model.get_submodule(name).weight
        assert weight.grad.stride() == weight.stride()
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    others = [
        *(copy.deepcopy(model), copy.deepcopy(model).half(), copy.deepcopy(model).to("meta")),
        *(torch.load(file, weights_only=False), loaded, ca.revert(model)),
    ]
    for other in others:
        assert are_1d_weights_last(other) == [True] * 4
    assert type(model.stem) is nn.Conv1d


@pytest.mark.parametrize("training", [False, True])
def test_a_1d_model_computes_in_channels_last(training: bool) -> None:
    """Where it is served: between its first input and its output all is dense in that layout, and
    numbers and gradients are those of float64."""
    model, x = OneDimensional().train(training), torch.randn(2, 5, 11)
    wide, x64 = copy.deepcopy(model).double(), x.double().requires_grad_()
    expected = wide(x64)
    expected.square().sum().backward()
    ca.convert(model, memory_format=LAST)
    x.requires_grad_()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in OF_1D:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)})
        )
    with served_on_cpu():
        output = model(x)
        output.square().sum().backward()
    for name, (given, made) in seen.items():
        # Batch norms make what they get contiguous.
        assert name in ("stem", "up") or given.stride() == images_strides(given), name
        assert made.stride() == images_strides(made), name
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-3, atol=1e-3)
    for (name, one), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert one.grad.stride() == one.stride(), name
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-3)


def test_an_error_in_the_backward_restores_the_layout(x: Tensor) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("no gradient here")

    model = Made(lambda model, x: Fails.apply(model.conv(x)), conv=nn.Conv2d(3, 4, 3))
    layouts.apply(model, LAST)
    before = strides(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="no gradient here"):
        ca.convert(model, memory_format="auto", example_input=x)
    assert strides(model) == before
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert type(model.conv) is nn.Conv2d


@pytest.mark.parametrize("memory_format", ["auto", LAST])
def test_lazy_and_wrapped_models_are_refused(memory_format: Any, x: Tensor) -> None:
    class FullyShardedDataParallel(nn.Module):  # known by its name
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

    example = x if memory_format == "auto" else None
    for model, said in (
        (nn.Sequential(nn.LazyConv2d(4, 3)), "model must have been called once"),
        (FullyShardedDataParallel(), "memory_format must be given before the model is wrapped"),
    ):
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=said):
            ca.convert(model, memory_format=memory_format, example_input=example)
        assert [type(module) for module in model.modules()] == before


def test_shared_weights_stay_shared(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
    model[1].weight = model[0].weight
    ca.convert(model, memory_format=LAST)
    assert model[1].weight is model[0].weight
    assert is_laid_out(model, LAST)


def test_in_inference_mode_weights_stay_trainable(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with torch.inference_mode():
        ca.convert(model, memory_format="auto", example_input=x)
        ca.convert(model, memory_format=LAST)
    assert is_laid_out(model, LAST)
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        ca.convert(model, memory_format=LAST)
        assert model(x).is_contiguous(memory_format=LAST)
    assert is_laid_out(model, LAST)
