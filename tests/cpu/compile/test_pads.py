"""Zeros that are padded in front of convolutions become the convolutions' padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from support.models.made import Made
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

import cudnn_autotune as ca
from cudnn_autotune.compile.graph_copies import with_our_convolutions

pytestmark = pytest.mark.usefixtures("on_cpu")

OPTIONS = {
    "fuse": "always",
    "norms": "never",
    "compare": False,
    "cpp.weight_prepack": False,
    "cpp.simdlen": 1,  # the code that torch 2.11 generates for vectors of float64 does not compile
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
LAST = torch.channels_last


def conv(dims: int = 2, **options: Any) -> nn.Module:
    layer: nn.Module = getattr(nn, f"Conv{dims}d")(4, 6, **{"kernel_size": 3, **options})
    return layer


def images(dims: int = 2) -> Tensor:
    return torch.randn(2, 4, *[9, 8, 7][:dims], dtype=torch.float64)


def nothing_padded(model: nn.Module, x: Tensor) -> list[Any]:
    """Returns the paddings of the convolutions in a model's graph, where nothing else pads."""
    paddings, pads = graph_of(model, x)
    assert not pads
    return paddings


def graph_of(model: nn.Module, *inputs: Tensor) -> tuple[list[Any], list[Any]]:
    """Returns the paddings of the convolutions in a model's graph, and what is padded besides."""
    paddings: list[Any] = []
    pads: list[Any] = []

    def keep(graph: GraphModule, _: object) -> GraphModule:
        ours = with_our_convolutions(graph, None, None)
        for node in ours.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if "conv" in name and node.op == "call_function":
                paddings.append(node.args[4] if len(node.args) > 4 else None)
            elif "pad" in name and node.op == "call_function":
                pads.append(node.args[1])
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(*inputs)
    torch._dynamo.reset()
    return paddings, pads


def results(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of a step."""
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(one.grad for one in model.parameters())]  # type: ignore[list-item]


def check(model: nn.Module, x: Tensor, **compile_options: Any) -> None:
    """Holds inference and a step to PyTorch's, with the strides of both."""
    model = model.to(x.dtype)
    tolerances = EXACT if x.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    theirs = copy.deepcopy(model)
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, **compile_options)
    with torch.no_grad():
        found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, **tolerances)
    assert found.stride() == expected.stride()
    for one, other in zip(results(ours, model, x), results(theirs, theirs, x), strict=True):
        torch.testing.assert_close(one, other, **tolerances)


FOLDED: dict[str, tuple[Callable[[], nn.Module], int, list[Any]]] = {
    "even": (lambda: nn.Sequential(nn.ZeroPad2d(1), conv()), 2, [[1, 1]]),
    "of two sizes": (lambda: nn.Sequential(nn.ZeroPad2d((2, 2, 1, 1)), conv()), 2, [[1, 2]]),
    "uneven": (
        lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv(stride=2)),
        2,
        [[0, 0, 1, 1]],
    ),
    "causal in time": (
        lambda: nn.Sequential(nn.ZeroPad3d((1, 1, 1, 1, 2, 0)), conv(3)),
        3,
        [[2, 1, 1, 0, 1, 1]],
    ),
    "causal in 1-d": (
        lambda: nn.Sequential(nn.ConstantPad1d((4, 0), 0.0), conv(1, dilation=2)),
        1,
        [[4, 0]],
    ),
    "beside its own": (
        lambda: nn.Sequential(nn.ConstantPad2d((2, 0, 0, 0), 0), conv(padding=(0, 1), groups=2)),
        2,
        [[0, 3, 0, 1]],
    ),
    "several": (
        lambda: nn.Sequential(nn.ZeroPad2d(1), nn.ZeroPad2d((1, 0, 0, 0)), conv(padding="valid")),
        2,
        [[1, 2, 1, 1]],
    ),
    "larger than the image": (
        lambda: nn.Sequential(nn.ZeroPad2d((11, 0, 0, 12)), conv(stride=3)),
        2,
        [[0, 11, 12, 0]],
    ),
    "in one dimension only": (
        lambda: Made(lambda m, x: m.conv(F.pad(x, (1, 1), "constant", 0)), conv=conv()),
        2,
        [[0, 1]],
    ),
    "by other names": (
        lambda: Made(
            lambda m, x: m.conv(
                torch.constant_pad_nd(F.pad(input=x, pad=(1, 1), value=0.0), (0, 1))
            ),
            conv=conv(),
        ),
        2,
        [[0, 1, 0, 2]],
    ),
    "for two readers": (
        lambda: Made(
            lambda m, x: (lambda y: m.one(y) + m.two(y))(F.pad(x, (1, 0, 1, 0))),
            one=conv(),
            two=conv(),
        ),
        2,
        [[1, 1, 0, 0]] * 2,
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_pad_becomes_the_convolutions_padding(name: str) -> None:
    make, dims, expected = FOLDED[name]
    torch.manual_seed(0)
    model, x = make().double(), images(dims)
    assert [list(one) for one in nothing_padded(model, x)] == expected
    check(model, x)


@pytest.mark.parametrize("name", ["uneven", "causal in 1-d"])
def test_no_program_pads(name: str) -> None:
    """Neither the forward nor the backward has a padded tensor, nor a padded gradient."""
    make, dims, _ = FOLDED[name]
    model, x = make().double(), images(dims)
    step = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    with torch.no_grad():
        _, codes = run_and_get_code(step, x)
    assert "cudnn_autotune.conv_" in codes[0]
    x.requires_grad_()
    _, of_training = run_and_get_code(lambda: step(x).sum().backward())
    assert all(any(f"conv_{name}.default" in c for c in of_training) for name in ("dgrad", "wgrad"))
    assert not any("constant_pad" in code for code in (*codes, *of_training))


def used_elsewhere(m: Any, x: Tensor) -> Tensor:
    y = F.pad(x, (1, 1, 1, 1))
    return m.conv(y).mean() + y.sigmoid().mean()


def returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.pad(x, (1, 1, 1, 1))
    return m.conv(y), y


def written(m: Any, x: Tensor) -> Tensor:
    y = F.pad(x, (1, 1, 1, 1))
    y[..., 0] = 1
    output: Tensor = m.conv(y)
    return output


def source_written(m: Any, x: Tensor) -> Tensor:
    x = x * 2
    y = F.pad(x, (1, 1, 1, 1))
    x.add_(1)
    output: Tensor = m.conv(y)
    return output * x.mean()


def written_after(m: Any, x: Tensor) -> Tensor:
    x = x * 2
    y: Tensor = m.conv(F.pad(x, (1, 1, 1, 1)))
    x.add_(1)
    return y * x.mean()


def without_gradient(m: Any, x: Tensor) -> Tensor:
    x = x * 2
    with torch.no_grad():
        y = F.pad(x, (1, 1, 1, 1))
    output: Tensor = m.conv(y)
    return output * x.mean()


def hooked(m: Any, x: Tensor) -> Tensor:
    y = F.pad(x, (1, 1, 1, 1))
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    output: Tensor = m.conv(y)
    return output


def as_weight(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, F.pad(m.conv.weight, (1, 1)))


def to_a_layer(pad: Callable[[Tensor], Tensor], layer: Callable[[], nn.Module]) -> Any:
    return lambda: Made(lambda m, x: m.conv(pad(x)), conv=layer())


STAYS: dict[str, Callable[[], nn.Module]] = {
    "negative": to_a_layer(lambda x: F.pad(x, (-1, 2)), conv),
    "of one": to_a_layer(lambda x: F.pad(x, (1, 1), value=1.0), conv),
    "reflected": to_a_layer(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), conv),
    "replicated": to_a_layer(lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), conv),
    "of channels": to_a_layer(lambda x: F.pad(x, (0, 0, 0, 0, 0, 1))[:, 1:], conv),
    "channels of the input": to_a_layer(
        lambda x: F.pad(x, (1, 1, 0, 0, 0, 2)), lambda: nn.Conv2d(6, 3, 3)
    ),
    "same": to_a_layer(lambda x: F.pad(x, (1, 0)), lambda: conv(padding="same")),
    "before another mode": to_a_layer(
        lambda x: F.pad(x, (1, 0)), lambda: conv(padding=1, padding_mode="circular")
    ),
    "transposed": to_a_layer(lambda x: F.pad(x, (1, 1)), lambda: nn.ConvTranspose2d(4, 3, 3)),
    "in between": to_a_layer(lambda x: F.pad(x, (1, 1)).relu(), conv),
    "used elsewhere": lambda: Made(used_elsewhere, conv=conv()),
    "returned": lambda: Made(returned, conv=conv()),
    "written": lambda: Made(written, conv=conv()),
    "source written": lambda: Made(source_written, conv=conv()),
    "source written after": lambda: Made(written_after, conv=conv()),
    "without a gradient": lambda: Made(without_gradient, conv=conv()),
    "a weight": lambda: Made(as_weight, conv=conv()),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_pads_stay(name: str) -> None:
    torch.manual_seed(0)
    model, x = STAYS[name]().double(), images()
    _, pads = graph_of(model, x.requires_grad_())
    assert pads
    if name == "returned":
        ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
        for found, expected in zip(ours(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, **EXACT)
        return
    theirs = copy.deepcopy(model)
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    found, expected = results(ours, model, x), results(theirs, theirs, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_hook_of_the_padded_tensor_runs() -> None:
    model = Made(hooked, conv=conv().double())
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    x = images()
    for one, other in zip(results(ours, model, x), results(model, model, x), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_numbers_that_are_not_finite() -> None:
    """Zeros of the border times an infinite weight are NaN, whoever pads."""
    model = FOLDED["uneven"][0]().double()
    with torch.no_grad():
        model[1].weight[0, 0, 2, 2] = torch.inf  # type: ignore[index, operator]
    x = images()
    x[0, 1, 3, 4] = torch.nan
    with torch.no_grad():
        ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
        found, expected = ours(x), model(x)
    assert expected.isnan().any()
    torch.testing.assert_close(found, expected, **EXACT, equal_nan=True)


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_channels_last(name: str) -> None:
    """In float32: on a GPU convolutions of float64 are contiguous."""
    model = FOLDED[name][0]().to(memory_format=LAST)
    check(model, images().float().contiguous(memory_format=LAST))


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_without_a_batch(name: str) -> None:
    model = FOLDED[name][0]().double()
    assert nothing_padded(model, images()[0])
    check(model, images()[0])


@pytest.mark.parametrize("name", ["uneven", "causal in time"])
def test_dynamic_sizes(name: str) -> None:
    make, dims, _ = FOLDED[name]
    model, x = make().double(), images(dims)
    check(model, x, dynamic=True)
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, dynamic=True)
    for size in (5, 6):
        torch.testing.assert_close(ours(x[..., :size]), model(x[..., :size]), **EXACT)


def test_what_follows_is_fused() -> None:
    """A batch norm, an activation and a residual as after any other convolution."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6)
    nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv(stride=2, bias=False), norm, nn.ReLU())
    model, x = model.double().eval(), images()
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    with torch.no_grad():
        _, (code,) = run_and_get_code(ours, x)
        torch.testing.assert_close(ours(x), model(x), **EXACT)
    assert [group.text for group in ca.compilations()[-1].fused] == ["conv + bias + relu"]
    assert "conv_fused.default" in code
    assert "constant_pad" not in code


def test_under_autocast_it_errs_like_pytorch() -> None:
    model = FOLDED["causal in time"][0]()
    x = images(3).bfloat16().float()
    exact = results(twin := copy.deepcopy(model).double(), twin, x.double())
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = results(ours, model, x), results(model, model, x)
    for one, other, value in zip(found, eager, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, value) <= 3 * relative_error(other, value) + 1e-6


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_a_model_of_timm(options: dict[str, Any]) -> None:
    layer = pytest.importorskip("timm.layers").Conv2dSame
    model = nn.Sequential(layer(4, 6, 3, stride=2), nn.ReLU(), layer(6, 6, 3, stride=2))
    check(model.double(), images(), **options)


def test_a_network_in_another_layout() -> None:
    """Convolutions of few channels keep theirs, so that the layout is asked for."""
    model = nn.Sequential(
        *FOLDED["uneven"][0](), nn.ReLU(), nn.ZeroPad2d((1, 0, 0, 1)), nn.Conv2d(6, 4, 2)
    )
    model, x = model.double(), images()
    for options in ({"memory_format": "auto", "compare": True}, {"compare": True}):
        ours = torch.compile(model, backend="cudnn_autotune", options={**OPTIONS, **options})
        with torch.no_grad() if len(options) == 1 else nullcontext():
            torch.testing.assert_close(ours(x), model(x), **EXACT)
        torch._dynamo.reset()


def test_a_crop_of_the_users_is_a_new_tensor() -> None:
    x = images()

    @torch.compile(backend="cudnn_autotune", options=OPTIONS)
    def cropped(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, w), F.pad(F.pad(x, (1, 2)), (-1, -2))

    _, again = cropped(x, torch.randn(6, 4, 3, 3, dtype=torch.float64))
    assert torch.equal(again, x)
    assert again.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_functions_take_both_sides(dims: int) -> None:
    """Two numbers of one dimension, four of two, six of three."""
    x, w = images(dims), torch.randn(6, 4, *[3] * dims, dtype=torch.float64)
    before, after = [2, 0, 1][:dims], [0, 1, 1][:dims]
    sizes = [size for d in reversed(range(dims)) for size in (before[d], after[d])]
    expected = getattr(F, f"conv{dims}d")(F.pad(x, sizes), w)
    function = getattr(ca.functional, f"conv{dims}d")
    for padding in ([*before, *after], (*before, *after)):
        torch.testing.assert_close(function(x, w, padding=padding), expected, **EXACT)
        torch.testing.assert_close(function(x[0], w, padding=padding), expected[0], **EXACT)
    operator = torch.ops.cudnn_autotune.conv_fprop
    rest = ([1] * dims, [*before, *after], [1] * dims, 1)
    torch.testing.assert_close(operator(x, w, None, *rest), expected, **EXACT)


def test_a_padding_of_both_sides_that_is_wrong() -> None:
    x, w = images(), torch.randn(4, 4, 3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="padding"):
        ca.functional.conv2d(x, w, padding=(0, 0, -1, 0))
    with pytest.raises(RuntimeError, match="padding"):
        ca.functional.conv2d(x, w, padding=(1, 1, 1))
    with pytest.raises(RuntimeError, match="padding"):
        ca.functional.conv_transpose2d(x, w, padding=(1, 1, 1, 1))
