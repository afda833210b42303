"""Batch norms that become operators in training graphs, and those that stay PyTorch's.

The graph of Dynamo is changed as the backend changes it, and then runs as it is: without Inductor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.made import Made
from support.norms.models import (
    Activated,
    Dense,
    IntoShortcut,
    Projected,
    Residual,
    SqueezeExcite,
    check_steps,
    conv,
    data,
)
from torch import Tensor, nn
from torch.fx import GraphModule

import cudnn_autotune as ca
from cudnn_autotune.compile.graph_copies import copied
from cudnn_autotune.compile.norms import NormReport, find_norms, serve_norms

OPERATOR = torch.ops.cudnn_autotune.batch_norm_act.default


class Served:
    """A backend of ``torch.compile`` that serves what norms it finds."""

    def __init__(self) -> None:
        self.reports: list[NormReport] = []
        self.targets: list[Any] = []

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        ours = copied(graph)
        norms = find_norms(ours.graph)
        self.reports += [norm.report() for norm in norms]
        serve_norms(ours.graph, norms)
        ours.graph.lint()
        ours.recompile()
        self.targets += [node.target for node in ours.graph.nodes]
        return ours

    @property
    def texts(self) -> list[str]:
        """The computations that are served."""
        return [report.text for report in self.reports if not report.reason]

    @property
    def reasons(self) -> list[str]:
        """Why norms are left to PyTorch."""
        return [report.reason for report in self.reports if report.reason]


def check(model: nn.Module, inputs: Sequence[Tensor], factor: float = 3, **options: Any) -> Served:
    """Trains a model with its norms served, and holds it to PyTorch's in float64."""
    served = Served()
    call = lambda one: torch.compile(one, backend=served, **options)  # noqa: E731
    check_steps(model, inputs, call, factor=factor)
    return served


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "residual": (Residual, ["norm + relu", "norm + residual + relu"]),
    "projected": (Projected, ["norm + residual + relu", "norm"]),
    "into shortcut": (IntoShortcut, ["norm", "norm + residual + relu"]),
    "squeeze": (SqueezeExcite, ["norm + silu", "norm + silu", "norm + residual"]),
    "hardswish": (lambda: Residual(activation=nn.Hardswish), ["norm + hardswish"] * 2),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_it_does(name: str, layout: torch.memory_format) -> None:
    make, texts = MODELS[name]
    torch.manual_seed(0)
    model = make().to(memory_format=layout)
    served = check(model, [one.to(memory_format=layout) for one in data(4, 8, 6, 5)])
    if name == "projected":  # either takes the addition
        assert sorted(served.texts) == sorted(texts)
    elif name == "hardswish":
        assert served.texts == ["norm + hardswish", "norm + residual + hardswish"]
    else:
        assert served.texts == texts
    assert served.reasons == []
    assert served.targets.count(OPERATOR) == len(texts)
    assert F.batch_norm not in served.targets


def test_an_addition_into_the_output_of_a_converted_convolution(on_cpu: None) -> None:
    """In the graph it is PyTorch's operator with a marked input."""

    class IntoConvolution(Projected):
        def forward(self, x: Tensor) -> Tensor:
            identity = self.shortcut(x)
            identity += self.norm(self.first(x))
            return identity.relu_()

    served = Served()
    model = ca.convert(IntoConvolution())
    torch.compile(model, backend=served)(*data(4, 8, 6, 5)[:1]).sum().backward()
    assert torch.ops.aten.conv2d in served.targets
    assert served.texts == ["norm + residual + relu"]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu method": lambda x: x.relu(),
    "relu_": torch.relu_,
    "relu6": F.relu6,
    "relu6 module": nn.ReLU6(inplace=True),
    "silu": F.silu,
    "hardswish": nn.Hardswish(inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda x: x.sigmoid_(),
    "leaky_relu(0.01)": F.leaky_relu,
    "leaky_relu(0.1) module": nn.LeakyReLU(0.1, inplace=True),
    "leaky_relu(0.2)": lambda x: F.leaky_relu(x, negative_slope=0.2),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(name: str) -> None:
    served = check(Activated(ACTIVATIONS[name]), data(4, 8, 6, 5))
    assert served.texts == [f"norm + {name.partition(' ')[0].rstrip('_')}"]


@pytest.mark.parametrize("function", [nn.LeakyReLU(0.3), F.hardtanh, torch.tanh, F.elu, abs])
def test_another_activation_is_not_taken(function: Callable[[Tensor], Tensor]) -> None:
    assert check(Activated(function), data(4, 8, 6, 5)).texts == ["norm"]


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": 0.9, "eps": 1e-2},
    ],
    ids=str,
)
def test_options_of_the_norm(options: dict[str, Any]) -> None:
    assert check(Activated(F.relu, **options), data(4, 8, 6, 5)).texts == ["norm + relu"]


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    convolution = getattr(nn, f"Conv{dims}d")(8, 8, 3, padding=1, bias=False)
    model = nn.Sequential(convolution, getattr(nn, f"BatchNorm{dims}d")(8), nn.ReLU())
    assert check(model, data(4, 8, *(5,) * dims)).texts == ["norm + relu"]


def test_running_statistics_and_counters_are_updated_together() -> None:
    model = nn.Sequential(*(Residual() for _ in range(3)))
    model[1].norm.momentum = 0.5
    served = check(model, data(4, 8, 6, 5))
    assert served.targets.count(torch.ops.aten._foreach_lerp_.Scalar) == 2
    assert served.targets.count(torch.ops.aten._foreach_add_.Scalar) == 1
    assert "add_" not in served.targets


def test_sizes_may_be_dynamic() -> None:
    inputs = [one for batch in (4, 3, 7) for one in data(batch, 8, 6, batch + 7, count=1)]
    served = check(Residual(), inputs, dynamic=True)
    assert served.reasons == []
    assert served.texts == ["norm + relu", "norm + residual + relu"]


def left(function: Callable[..., Tensor]) -> Made:
    """A convolution, a norm, and what a case makes of them."""
    return Made(function, conv=conv(8, 8), norm=nn.BatchNorm2d(8))


def scaled(model: Made, x: Tensor) -> Tensor:
    return torch.add(model.norm(model.conv(x)), x, alpha=2)


def broadcast(model: Made, x: Tensor) -> Tensor:
    return model.norm(model.conv(x)) + x[:1]


def with_number(model: Made, x: Tensor) -> Tensor:
    return model.norm(model.conv(x)) + 1


def with_itself(model: Made, x: Tensor) -> Tensor:
    y = model.norm(model.conv(x))
    return (y + y).relu()


def read_twice(model: Made, x: Tensor) -> Tensor:
    y = model.norm(model.conv(x))
    return y.relu() + y


def into_what_is_read(model: Made, x: Tensor) -> Tensor:
    other = x * 2
    y = model.norm(model.conv(x))
    total = other
    total += y
    return total.relu() + other


def residual_written_between(model: Made, x: Tensor) -> Tensor:
    other = x * 2
    y = model.norm(model.conv(x))
    y = y + other
    other.mul_(3)
    return y.relu() + other


def residual_written_later(model: Made, x: Tensor) -> Tensor:
    other = x * 2
    y = F.silu(model.norm(model.conv(x)) + other)
    other.mul_(3)
    return y + other


def view_of_residual_written_later(model: Made, x: Tensor) -> Tensor:
    other = x * 2
    y = F.hardswish(model.norm(model.conv(x)) + other)
    other[0] = 0
    return y + other


def output_written_later(model: Made, x: Tensor) -> Tensor:
    y = F.relu6(model.norm(model.conv(x)) + x)
    y.mul_(2)
    return y


def bias_written_later(model: Made, x: Tensor) -> Tensor:
    bias = x.mean((0, 2, 3))
    y = F.batch_norm(model.conv(x), None, None, None, bias, training=True)
    y = F.silu(y)
    bias.mul_(2)
    return y + bias.sum()


def input_written_between(model: Made, x: Tensor) -> Tensor:
    first = model.conv(x)
    y = model.norm(first)
    first.zero_()
    return (y + x).relu()


def view_of_input_written_between(model: Made, x: Tensor) -> Tensor:
    first = model.conv(x)
    y = model.norm(first)
    first.flatten()[3:].zero_()
    return (y + x).relu()


def item_written_between(model: Made, x: Tensor) -> Tensor:
    first = model.conv(x)
    y = model.norm(first)
    first[0] = 0
    return (y + x).relu()


def inplace_by_position(model: Made, x: Tensor) -> Tensor:
    first = model.conv(x)
    y = model.norm(first)
    z = F.relu(first, True)
    return (y + x).relu() + z


def gradients_off_between(model: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model.norm(model.conv(x))
    return y.relu() * x


CASES: dict[Callable[..., Tensor], str] = {
    scaled: "norm",
    broadcast: "norm",
    with_number: "norm",
    with_itself: "norm",
    read_twice: "norm",
    into_what_is_read: "norm",
    residual_written_between: "norm + residual",
    gradients_off_between: "norm",
    residual_written_later: "norm + residual",
    view_of_residual_written_later: "norm + residual",
    output_written_later: "norm + residual",
    bias_written_later: "norm",
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_what_others_see_is_left(function: Callable[..., Tensor]) -> None:
    assert check(left(function), data(4, 8, 6, 5)).texts == [CASES[function]]


@pytest.mark.parametrize(
    "function",
    [
        input_written_between,
        view_of_input_written_between,
        item_written_between,
        inplace_by_position,
    ],
    ids=lambda function: function.__name__,
)
def test_an_input_that_is_written_before_the_addition(function: Callable[..., Tensor]) -> None:
    # Eager mode has no backward for these.
    model, served = left(function), Served()
    x = data(4, 8, 6, 5)[0]
    expected = function(copy.deepcopy(model), x)
    torch.testing.assert_close(torch.compile(model, backend=served)(x), expected)
    assert served.texts == ["norm"]


def test_an_output_of_the_norm_that_is_written_later() -> None:
    def function(model: Made, x: Tensor) -> Tensor:
        y = model.norm(model.conv(x))
        y = F.silu(y)
        z = y.sum().detach()
        y.mul_(2)
        return y * z.sigmoid()

    assert check(left(function), data(4, 8, 6, 5)).texts == ["norm + silu"]


def test_a_norm_in_eval_mode_is_frozen() -> None:
    model = Residual()
    nn.init.normal_(model.norm.running_mean)  # type: ignore[arg-type]
    model.norm.eval()
    served = check(model, data(4, 8, 6, 5))
    assert served.texts == ["norm + residual + relu"]
    assert F.batch_norm in served.targets
    assert model.norm.num_batches_tracked == 0


def test_a_norm_that_is_called_twice_updates_in_turn() -> None:
    def function(model: Made, x: Tensor) -> Tensor:
        return model.norm(model.conv(model.norm(model.conv(x)).relu())).relu()

    served = check(left(function), data(4, 8, 6, 5))
    assert served.texts == []
    assert served.reasons == ["its running statistics are used elsewhere too"] * 2


def test_running_statistics_that_are_read_elsewhere() -> None:
    def function(model: Made, x: Tensor) -> Tensor:
        y = model.norm(model.conv(x))
        return y * model.norm.running_var.mean()  # type: ignore[union-attr]

    served = check(left(function), data(4, 8, 6, 5))
    assert served.reasons == ["its running statistics are used elsewhere too"]


def test_running_statistics_in_shared_memory() -> None:
    model = Residual()
    model.norm2.running_mean = model.norm.running_mean.view(-1)  # type: ignore[union-attr]
    served = check(model, data(4, 8, 6, 5))
    assert served.reasons == ["its running statistics are used elsewhere too"] * 2


def test_averages_over_all_steps_are_pytorchs() -> None:
    assert check(Activated(F.relu, momentum=None), data(4, 8, 6, 5)).texts == []


def test_a_norm_of_a_concatenation_is_left() -> None:
    served = check(Dense(), data(4, 8, 6, 5))
    assert served.texts == []
    assert served.reasons == ["its input is a concatenation, which takes less memory in parts"] * 2


def test_double_precision_is_pytorchs() -> None:
    model = Activated(F.relu).double()
    served = check(model, [one.double() for one in data(4, 8, 6, 5)])
    assert served.reasons == ["it is in torch.float64"]


def test_statistics_in_another_dtype_are_pytorchs() -> None:
    model = Activated(F.relu).bfloat16()
    served = Served()
    torch.compile(model, backend=served)(data(4, 8, 6, 5)[0].bfloat16())
    assert served.reasons == ["its running statistics are torch.bfloat16 on the device cpu"]


def test_one_value_a_channel_is_pytorchs_error() -> None:
    model = nn.Sequential(conv(8, 8), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
    served = torch.compile(model, backend=Served())
    with pytest.raises(RuntimeError, match="Expected more than 1 value per channel when training"):
        served(torch.randn(1, 8, 4, 4))


def test_autocast() -> None:
    served = Served()
    compile = functools.partial(torch.compile, backend=served)
    check_steps(Residual(), data(4, 8, 6, 5), compile, autocast=True)
    assert served.texts[0] == "norm + relu"


def test_transforms_of_torch_func_are_left() -> None:
    model = left(lambda model, x: model.norm(model.conv(x)).relu())

    def loss(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda one: model(one[None]).sum(), randomness="same")(x)

    model.norm.track_running_stats = False
    model.norm.running_mean = model.norm.running_var = None
    served = Served()
    x = data(4, 8, 6, 5)[0]
    torch.testing.assert_close(torch.compile(loss, backend=served)(x), loss(x))
    assert served.texts == []


def test_a_hook_sees_the_norms_own_output() -> None:
    model = Activated(F.relu)
    model.norm.register_forward_hook(lambda module, args, output: output * 2)
    assert check(model, data(4, 8, 6, 5)).texts == ["norm"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121"])
@pytest.mark.slow
def test_models_of_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = getattr(models, name)(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    # Deep models amplify rounding: on one CPU a ResNet-18 has 3.1 times PyTorch's error.
    served = check(model, data(4, 3, 64, 64, count=2), factor=8)
    of_concatenations = 62 if name == "densenet121" else 0
    assert len(served.reasons) == of_concatenations
    assert len(served.texts) == norms - of_concatenations


class SharedCounter(nn.Module):
    """Counts in a place that is read within the step by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        counts = torch.zeros(2, dtype=torch.int64)
        self.register_buffer("count", counts[0])
        self.register_buffer("counts", counts)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return F.relu(self.norm(self.conv(x))) * self.counts[0]


def test_a_counter_in_shared_memory_counts_at_its_place() -> None:
    model = SharedCounter()
    call = torch.compile(model, backend=Served())
    assert call(torch.randn(4, 8, 6, 5)).abs().sum() > 0
    assert model.counts.tolist() == [1, 0]
