"""Training by ``torch.compile(model, backend="cudnn_autotune")`` in another layout than the
model's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.made import Made
from support.models.trained import MODELS
from support.norms.models import Residual, check_steps, data
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.compile import compiled_graph, entry, joint_graph, training_graph
from cudnn_autotune.compile.comparison import Comparison
from cudnn_autotune.compile.compilation import EAGER
from cudnn_autotune.compile.joint_graph import sum_in_memory_order
from cudnn_autotune.compile.training_graph import WITHOUT_NORMS

LAID_OUT = "cudnn_autotune, channels_last"
OPTIONS = {"norms": "always", "compare": False, "cpp.weight_prepack": False}


@pytest.fixture
def favoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is put into channels_last, whatever its dtype and device."""
    monkeypatch.setattr(entry, "_why_plain", lambda *_: None)
    monkeypatch.setattr(training_graph, "favours_channels_last", lambda *_, **__: True)


pytestmark = pytest.mark.usefixtures("favoured")


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**OPTIONS, **options})


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.basic(4)
def test_a_model_trains_as_it_does(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make(1)
    before = {key: value.stride() for key, value in model.state_dict().items()}
    check_steps(model, data(*shape), compiled, autocast, factor=6)
    assert last().chosen == LAID_OUT, last().note
    for key, value in model.state_dict().items():
        assert value.stride() == before[key]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def step(model: Any, x: Tensor, of: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output of a model and all gradients."""
    of.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in of.named_parameters()}
    return output, {**gradients, "input": x.grad}


def check(model: nn.Module, x: Tensor, call: Any = None) -> None:
    """Outputs and gradients are those of PyTorch in float64, and strides PyTorch's."""
    expected, of_expected = step(exact := copy.deepcopy(model).double(), x.double(), exact)
    output, gradients = step(compiled(model) if call is None else call, x, model)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    assert output.stride() == expected.stride()
    for name, wanted in of_expected.items():
        found = gradients[name]
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5, msg=name)
            assert name == "input" or found.stride() == wanted.stride(), name


IMAGES = (2, 8, 8, 7)


def shared() -> nn.Module:
    """A weight of two convolutions, one of which is transposed, and of a penalty."""

    def forward(model: Any, x: Tensor) -> Tensor:
        y = F.conv_transpose2d(model.conv(x), model.conv.weight)
        return model.conv(y) * (1 + model.conv.weight.square().sum())

    return Made(forward, conv=nn.Conv2d(8, 8, 3))


def parts() -> nn.Module:
    """Weights that are views of one parameter."""

    def forward(model: Any, x: Tensor) -> Tensor:
        first, second = model.flat.weight[0].split([8 * 8 * 9, 8 * 8])
        return F.conv2d(F.conv2d(x, first.view(8, 8, 3, 3)).relu(), second.view(8, 8, 1, 1))

    return Made(forward, flat=nn.Linear(8 * 8 * 10, 1))


def computed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(8, 8, 3)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Conv2d(8, 4, 3)),
    ).eval()  # spectral norm writes its vectors in training


def frozen() -> nn.Module:
    layers = [nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)]
    layers[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    layers[2].requires_grad_(False)
    return nn.Sequential(*layers)


def mixed() -> nn.Module:
    """Weights in each layout, and one that is dense in neither."""
    layers = [nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 2), nn.Conv2d(8, 8, 1)]
    for layer in (layers[1], layers[3]):
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layers[2].weight = nn.Parameter(torch.randn(8, 8, 2, 4)[..., ::2] / 8)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("make", [shared, parts, computed, frozen, mixed])
@pytest.mark.basic(2)
def test_weights_of_any_kind(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    check(make(), torch.randn(IMAGES))
    assert last().chosen == LAID_OUT, last().note


@pytest.mark.slow
def test_parameters_gradients_and_states_keep_their_strides() -> None:
    """Hooks see it, steps add up, and states of an optimizer are loaded by a plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
    twin = copy.deepcopy(model)
    seen: list[tuple[int, ...]] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.stride()))
    call = compiled(model)
    one, other = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (model, twin))
    for _ in range(2):
        for x in torch.randn(2, *IMAGES):  # two gradients add up
            for each in (call, twin):
                each(x).square().mean().backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    strides = [parameter.stride() for parameter in twin.parameters()]
    assert sorted(seen) == sorted(strides * 4)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    states = one.state_dict()["state"].values()
    assert [state["exp_avg"].stride() for state in states] == strides
    other.load_state_dict(one.state_dict())
    twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.load_state_dict(twin.state_dict())
    assert [parameter.stride() for parameter in model.parameters()] == strides
    check(model, torch.randn(IMAGES), call)


@pytest.mark.slow
def test_a_checkpoint_around_it() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    call = compiled(model)
    check(model, torch.randn(IMAGES), lambda x: checkpoint(call, x, use_reentrant=False))
    assert last().chosen == LAID_OUT, last().note


def of_checkpoint(model: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(model.conv, x, use_reentrant=False) + model.other(x)
    return result


def of_transform(model: Any, x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return model.conv(x).square().sum()

    return model.conv(x) + torch.func.grad(loss)(x).mean()


def of_outputs(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.conv(x).view(2, -1)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "dynamic", "reason"),
    [
        (of_checkpoint, False, "a part of it is a graph, such as a checkpoint"),
        (of_transform, False, "it has a transform of torch.func"),
        (of_outputs, False, "view"),
        (lambda model, x: model.conv(x), True, "sizes are dynamic"),
    ],
)
def test_what_keeps_its_layout_says_why(
    forward: Callable[[Any, Tensor], Tensor], dynamic: bool, reason: str
) -> None:
    model = Made(forward, conv=nn.Conv2d(8, 8, 3), other=nn.Conv2d(8, 8, 3))
    call = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, dynamic=dynamic)
    check(model, torch.randn(IMAGES), call)
    assert last().chosen == "cudnn_autotune"
    assert last().note.startswith(f"no {LAID_OUT}: ")
    assert reason in last().note


@pytest.mark.parametrize("loser", [LAID_OUT, WITHOUT_NORMS])
@pytest.mark.basic(1)
def test_a_step_decides_with_norms(loser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = compiled_graph.compare

    def slowed(*arguments: Any) -> Comparison:
        found = compare(*arguments)
        assert found.wrong == {}
        return Comparison({name: 9.0 if name == loser else 1.0 for name in found.times_ms}, {}, {})

    monkeypatch.setattr(compiled_graph, "compare", slowed)
    options = {"norms": "measure", "compare": True}
    model = Residual()
    check_steps(model, data(4, 8, 6, 5), lambda one: compiled(one, **options))
    assert list(last().times_ms) == [WITHOUT_NORMS, LAID_OUT]
    assert last().chosen == (WITHOUT_NORMS if loser == LAID_OUT else LAID_OUT)
    assert {report.is_served for report in last().norms} == {loser != LAID_OUT}
    assert model.norm.num_batches_tracked == 3


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The layouts of the programs that are compiled."""
    compile_training, found = training_graph.compile_training, []

    def counted(*arguments: Any, memory_format: str | None, **options: Any) -> Any:
        found.append(memory_format)
        return compile_training(*arguments, memory_format=memory_format, **options)

    monkeypatch.setattr(training_graph, "compile_training", counted)
    return found


@pytest.mark.parametrize("convolutions_ms", [1.0, 1.2])
def test_what_cannot_win_is_not_compiled(
    convolutions_ms: float, programs: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's convolutions alone, in the model's layout, take longer than a step."""
    compare, seen = compiled_graph.compare, []

    def slowed(*arguments: Any) -> Comparison:
        found = compare(*arguments)
        assert found.wrong == {}
        seen.append(list(found.times_ms))
        times = dict.fromkeys(found.times_ms, 9.0) | {LAID_OUT: 1.0}
        return Comparison(times, times, {})

    monkeypatch.setattr(compiled_graph, "compare", slowed)
    monkeypatch.setattr(training_graph, "convolutions_ms", lambda *_: convolutions_ms)
    model = Residual()
    check_steps(model, data(4, 8, 6, 5), lambda one: compiled(one, norms="measure", compare=True))
    is_clear = convolutions_ms > 1.1
    assert programs == ["channels_last"] + [None] * (not is_clear)
    assert seen == [[EAGER, LAID_OUT]] + [[WITHOUT_NORMS, LAID_OUT]] * (not is_clear)
    assert (last().chosen, last().note) == (LAID_OUT, "")
    assert all(report.is_served for report in last().norms)
    assert model.norm.num_batches_tracked == 3


class Doubled(torch.autograd.Function):
    """Returns a tensor, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.basic(1)
def test_a_program_with_wrong_gradients_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_training = training_graph.compile_training

    def wrong(*arguments: Any, memory_format: str | None, **options: Any) -> Any:
        program = compile_training(*arguments, memory_format=memory_format, **options)
        if memory_format is None:
            return program

        def run(*inputs: Any) -> Any:
            doubled = [Doubled.apply(one) if one.requires_grad else one for one in inputs]
            return program.run(*doubled)

        return replace(program, run=run)

    monkeypatch.setattr(training_graph, "compile_training", wrong)
    model = Residual()
    check_steps(model, data(4, 8, 6, 5), lambda one: compiled(one, norms="measure", compare=True))
    text = f"{LAID_OUT}: gradient 0 has a relative error of 1, allowed is"
    assert last().note.startswith(text)
    assert (last().chosen, list(last().times_ms)) == (WITHOUT_NORMS, [WITHOUT_NORMS])
    assert any("is not used: gradient 0" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_without_a_comparison_the_layout_stays(
    programs: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_graph, "is_within_step", lambda: True)
    call = compiled(Residual(), norms="measure", compare=True)
    for step in range(12):
        call(torch.randn(4, 8, 6, 5)).sum().backward()
        assert (last().chosen == WITHOUT_NORMS) == ("not compared" in last().note) == (step >= 9)
    assert programs == ["channels_last", None]
    assert not any(report.is_served for report in last().norms)


@pytest.mark.parametrize("given", ["contiguous", "channels_last"])
@pytest.mark.slow
def test_auto_compares_the_other_layout(given: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    if given == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = "contiguous" if given == "channels_last" else "channels_last"
    check(model, torch.randn(IMAGES), compiled(model, compare=True, memory_format="auto"))
    assert list(last().times_ms) == ["cudnn_autotune", f"cudnn_autotune, {other}"], last().note
    assert last().chosen in last().times_ms
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert not [record for record in warned if record.name.startswith("cudnn_autotune")]


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "batch": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "instance": lambda x, mean, var: F.instance_norm(x, mean, var),
    "batch, torch's": lambda x, mean, var: torch.batch_norm(
        *(x, None, None, mean, var, True, 0.1, 1e-5, False)
    ),
    "instance, torch's": lambda x, mean, var: torch.instance_norm(
        *(x, None, None, mean, var, True, 0.1, 1e-5, False)
    ),
    "batch, native": lambda x, mean, var: torch.native_batch_norm(
        *(x, None, None, mean, var, True, 0.1, 1e-5)
    )[0],
    "batch, ATen's": lambda x, mean, var: torch.ops.aten.batch_norm.default(
        *(x, None, None, mean, var, True, 0.1, 1e-5, False)
    ),
}


@pytest.mark.parametrize("are_inputs", [False, True])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.basic(2, of="are_inputs")
def test_a_comparison_updates_running_statistics_once(name: str, are_inputs: bool) -> None:
    """They are rows of one tensor."""

    def forward(model: Any, x: Tensor, *given: Tensor) -> Tensor:
        mean, var = given[0] if given else model.statistics
        return NORMS[name](model.conv(x), mean, var)

    model = Made(forward, conv=nn.Conv2d(8, 8, 3))
    model.register_buffer("statistics", torch.ones(2, 8))
    statistics, call = torch.ones(2, 8), compiled(model, compare=True, memory_format="auto")
    twin, exact = copy.deepcopy(model).double(), torch.ones(2, 8).double()
    for _ in range(2):
        x = torch.randn(IMAGES)
        call(x, *[statistics] * are_inputs).sum().backward()
        twin(x.double(), *[exact] * are_inputs)
    torch.testing.assert_close(statistics.double(), exact)
    torch.testing.assert_close(model.statistics.double(), twin.statistics)
    assert last().note == "not compared: the graph writes into its inputs" * are_inputs


def test_a_comparison_moves_an_observer_once() -> None:
    """Training with fake quantisation: the range of the values is a moving average."""

    def forward(model: Any, x: Tensor) -> Tensor:
        state = model.on, model.on, model.least, model.most, model.scale, model.zero
        return torch.fused_moving_avg_obs_fake_quant(model.conv(x), *state, 0.1, 0, 255, -1)

    model = Made(forward, conv=nn.Conv2d(8, 8, 3))
    for name in ("on", "least", "most", "scale"):
        model.register_buffer(name, torch.ones(1))
    model.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
    twin, call = copy.deepcopy(model), compiled(model, compare=True, memory_format="auto")
    for _ in range(2):
        x = torch.randn(IMAGES)
        call(x).sum().backward()
        twin(x)
    assert last().times_ms
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


@pytest.mark.parametrize("up", [nn.ConvTranspose1d, nn.ConvTranspose2d])
@pytest.mark.basic(1)
def test_a_backward_reads_one_copy_of_the_gradient(up: Any, on_cpu: None) -> None:
    """In the layout, whatever the strides of the caller's gradient."""
    model, x = up(8, 6, 2, 2), torch.randn(2, 8, *[5, 4][: 2 if up is nn.ConvTranspose2d else 1])
    call = compiled(model)
    _, (_, backward) = run_and_get_code(lambda: call(x.requires_grad_()).sin().sum().backward())
    operand = r"(?:reinterpret_tensor\()?(\w+), "
    (of_input,) = re.findall(rf"conv_fprop\.default\({operand}", backward)
    (of_weight,) = re.findall(rf"conv_wgrad\.default\(\w+, {operand}", backward)
    assert of_input == of_weight
    (strides,) = re.findall(rf"{of_input} = empty_strided_cpu\(\(.*?\), \((.*?)\)", backward)
    assert strides.split(", ")[1] == "1"


def biased(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), norm, nn.LeakyReLU(0.1), nn.ConvTranspose2d(8, 4, 2))


def read_twice() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.conv(x)
        result: Tensor = model.norm(x) * x
        return result

    return Made(forward, conv=nn.Conv2d(8, 8, 3), norm=nn.InstanceNorm2d(8))


def norm_of_rows() -> nn.Module:
    """One image without a batch, whose first dimension the norm takes for a batch."""
    return Made(
        lambda model, x: model.norm(model.conv(x[0])).square(),
        conv=nn.Conv2d(8, 8, 1),
        norm=nn.BatchNorm1d(IMAGES[2]),
    )


class PlainNorm(nn.BatchNorm2d):
    """PyTorch's other function for a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(x, *tensors, True, 0.1, self.eps, False)


@pytest.mark.parametrize(
    ("make", "is_zero"),
    [
        (lambda: biased(PlainNorm(8)), True),
        (lambda: biased(nn.InstanceNorm2d(8, affine=True)), True),
        (lambda: biased(nn.BatchNorm2d(8)), True),
        (lambda: biased(nn.BatchNorm2d(8, track_running_stats=False)).eval(), True),
        (lambda: biased(nn.InstanceNorm2d(8)), False),
        (lambda: biased(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)), True),
        (lambda: biased(nn.BatchNorm2d(8)).eval(), False),
        (lambda: biased(nn.GroupNorm(4, 8)), False),
        (read_twice, False),
        (norm_of_rows, False),
    ],
)
@pytest.mark.basic(1)
def test_biases_before_norms(make: Callable[[], nn.Module], is_zero: bool) -> None:
    """The gradient of one that a norm subtracts is zero, and not what is left by rounding."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(IMAGES)
    twin = copy.deepcopy(model).double()
    before = model.get_parameter("conv.bias" if hasattr(model, "conv") else "0.bias")
    check(model, x)
    assert before.grad is not None
    assert bool((before.grad == 0).all()) == (is_zero and last().chosen == LAID_OUT)
    twin(x.double())
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name).double(), buffer.double())


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
@pytest.mark.basic(1)
def test_a_bias_that_is_not_finite_reaches_the_output(bias: float) -> None:
    """It is not lost although a norm subtracts it."""
    model = biased(nn.InstanceNorm2d(8, affine=True))
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = bias
    x = torch.randn(IMAGES)
    ran = torch.compile(model, backend="cudnn_autotune", options={"compare": False})
    assert bool(model(x).isnan().all())
    assert bool(ran(x).isnan().all())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.basic(1)
def test_a_bias_without_gradients_gets_none(norm: Callable[..., nn.Module]) -> None:
    """An optimizer would decay it by a gradient of zeros."""

    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = model.conv(x)
        result: Tensor = model.last(model.norm(x).relu())
        return result

    model = Made(
        forward, conv=nn.Conv2d(8, 8, 3), norm=norm(8, affine=True), last=nn.Conv2d(8, 4, 1)
    )
    check(model, torch.randn(IMAGES))
    assert last().chosen == LAID_OUT, last().note
    assert model.conv.bias.grad is None


@pytest.mark.slow
def test_a_transform_of_a_norm_keeps_its_bias() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            result: Tensor = model.norm(model.conv(x)).square().sum()
            return result

        return model.norm(model.conv(x)) + torch.func.grad(loss)(x).mean()

    model = Made(forward, conv=nn.Conv2d(8, 8, 3), norm=nn.InstanceNorm2d(8))
    model.conv.bias.requires_grad_(False)  # its gradient would be what is left by rounding
    check(model, torch.randn(IMAGES))


@pytest.mark.slow
def test_a_gradient_of_one_number(on_cpu: None) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3))
    check(model, torch.randn(1, 8, 5, 5))
    assert last().chosen == LAID_OUT, last().note


def test_no_strides_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Inductor would pad some that views read, before a convolution decides on others for
    the same memory."""
    found: list[bool] = []
    lower = GraphLowering.run

    def spy(self: Any, *inputs: Any) -> Any:
        found.append(config.comprehensive_padding)
        return lower(self, *inputs)

    monkeypatch.setattr(GraphLowering, "run", spy)
    check(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)), torch.randn(IMAGES))
    assert last().chosen == LAID_OUT, last().note
    assert found == [False, False], "forward and backward"


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5), (2, 3, 2, 2, 3)])
@pytest.mark.parametrize("dims", [None, (0, 1, 2), (1, 2), (0, 2), (1,)])
def test_sums_are_in_memory_order(shape: tuple[int, ...], dims: tuple[int, ...] | None) -> None:
    summed = [*range(len(shape))] if dims is None else [*dims]
    x = torch.randn(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    graph = make_fx(lambda x: (x * 2).sum(summed, True), tracing_mode="fake")(x)
    sum_in_memory_order(graph.graph)
    graph.recompile()
    total = (x * 2).sum(summed, True)
    torch.testing.assert_close(graph(x), total)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    strides = node.args[0].meta["val"].stride()
    read = [strides[dim] for dim in node.args[1]]
    assert read == sorted(read, reverse=True)
    is_permuted = strides != x.stride()
    assert is_permuted == (1 in summed and max(summed) > 1)


@pytest.mark.parametrize("weights", [1, 8])
def test_the_gradient_of_prelu(weights: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.PReLU(weights), nn.Conv2d(8, 4, 1))
    check(model, torch.randn(IMAGES))
    assert last().chosen == LAID_OUT, last().note


@pytest.mark.parametrize("is_laid_out", [False, True])
@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_output_gradients_are_in_memory_before_biases_are_summed(
    conv: Any, is_laid_out: bool, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    rewrite = training_graph.rewrite_joint

    def spy(graph: Graph) -> None:
        rewrite(graph)
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and "inductor_realize_to_strides" in node.meta:
                found.append(value.stride(1) == 1)

    monkeypatch.setattr(training_graph, "rewrite_joint", spy)
    monkeypatch.setattr(training_graph, "favours_channels_last", lambda *_, **__: is_laid_out)
    monkeypatch.setattr(joint_graph, "_LEAST_SUMMED", 1)
    model = nn.Sequential(conv(8, 8, 3), nn.SiLU(), conv(8, 4, 3))
    rank = {nn.Conv1d: 1, nn.Conv3d: 3}.get(conv, 2)
    check(model, torch.randn(2, 8, *[7] * rank))
    assert found == [True] * (2 * is_laid_out)


def pooled() -> nn.Module:
    """The pyramid of poolings of a detector."""

    def forward(model: Any, x: Tensor) -> Tensor:
        found = [model.first(x)]
        for _ in range(2):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        result: Tensor = model.last(torch.cat(found, 1))
        return result

    return Made(forward, first=nn.Conv2d(8, 8, 1), last=nn.Conv2d(24, 4, 1))


@pytest.mark.basic(1)
def test_a_pyramid_of_poolings() -> None:
    torch.manual_seed(0)
    check(pooled(), torch.randn(IMAGES))
    assert last().chosen == LAID_OUT, last().note


PARTS: dict[str, Callable[[], nn.Module]] = {
    "even": lambda: nn.Conv2d(4, 6, 3, 2, 1),
    "uneven": lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3, 2)),
}


def joined(part: nn.Module) -> nn.Module:
    """A part of a block's channels is convolved, and then concatenated with all of them."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.norm(model.split(x)).relu()
        y = torch.cat([x, model.up(model.part(x.chunk(2, 1)[1]))], 1)
        result: Tensor = model.join(y)
        return result

    return Made(
        forward,
        split=nn.Conv2d(8, 8, 1, bias=False),
        norm=nn.BatchNorm2d(8),
        part=part,
        up=nn.ConvTranspose2d(6, 4, 2, 2),
        join=nn.Conv2d(12, 4, 1),
    )


@pytest.mark.parametrize("padding", PARTS)
def test_operators_get_no_slices(padding: str, on_cpu: None) -> None:
    """They would copy these, each for itself."""
    torch.manual_seed(0)
    x, model = torch.randn(2, 8, 8, 6), joined(PARTS[padding]())
    _, codes = run_and_get_code(lambda: check(model, x))
    assert last().chosen == LAID_OUT, last().note
    lines = [line for code in codes for line in code.splitlines()]
    # The backward gets the same copy of a part as its convolution.
    readers = [line for line in lines if re.search(r"cudnn_autotune\.|return \(", line)]
    views = r"reinterpret_tensor\(\w+, \((\d+, .*?)\), \((.*?)\)"
    assert {"conv_wgrad", "batch_norm_act_backward"} <= {*re.findall(r"\w+", "".join(readers))}
    for sizes, strides in re.findall(views, "".join(readers)):
        _, channels, height, width = map(int, sizes.split(", "))
        if height == 1:
            continue  # it fits every layout
        dense = (channels * height * width, 1, width * channels, channels)
        assert strides == ", ".join(map(str, dense))


def test_hooks_see_gradients_in_the_strides_of_pytorch() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(1, 4, 6, 7))
            self.convs = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.convs(x + self.places)
            return result

    model = Placed()
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append((name, grad.stride())))
    found = []
    for call in (model, compiled(model)):
        x = torch.randn(2, 4, 6, 7, requires_grad=True)
        x.register_hook(lambda grad: seen.append(("x", grad.stride())))
        call(x).sin().sum().backward()
        found.append(sorted(seen))
        seen.clear()
    assert last().chosen == LAID_OUT, last().note
    assert found[0] == found[1]
