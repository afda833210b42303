"""``convert`` and ``revert``: what they change of a model, what they keep, and what they refuse."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.watched_calls import FORWARD, Watched
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize

import cudnn_autotune as ca


class Plain(nn.Conv2d):
    """A subclass that computes what its base does."""


class Standardized(nn.Conv2d):
    """A forward of its own, as timm's StdConv2d."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class BySuper(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def helper(input: Tensor, weight: Tensor) -> Tensor:
    return torch.conv2d(input, weight, padding=1)


class Functional(nn.Module):
    """No convolution by its class; it calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, input: Tensor) -> Tensor:
        return self.blurred(input)

    def blurred(self, input: Tensor) -> Tensor:
        return helper(input, self.kernel)


class OwnLazy(nn.LazyConv2d):
    cls_to_become = Plain


class OwnSampling(nn.Conv2d):
    sampling = "bilinear"


class Net(nn.Module):
    """Every kind of convolution that is converted, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect")
        self.twice = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.kinds = nn.Sequential(
            Plain(4, 4, 1),
            Standardized(4, 4, 3, padding=1),
            BySuper(4, 4, 1, bias=False),
            Functional(),
            nn.Sequential(self.twice, nn.BatchNorm2d(4), nn.ReLU()),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kinds(self.twice(self.stem(x)))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


SERVED = {
    "stem": "Conv2d",
    "twice": "Conv2d",
    "kinds.0": "Plain",
    "kinds.1": "Standardized",
    "kinds.2": "BySuper",
    "kinds.3": "Functional",
}


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 9)


def classes(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


# What is converted, and what of it stays.


def test_every_kind_is_converted_in_place(model: Net, x: Tensor) -> None:
    expected, parameters = model(x), dict(model.named_parameters())
    state, modules = model.state_dict(), list(model.modules())
    assert ca.convert(model, "race", 1 << 20) is model
    found = ca.conversion(model)
    assert found.served == SERVED
    assert found.left == {}
    assert found.memory_format is None
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(model(x), expected)
    for name in SERVED:
        module = model.get_submodule(name)
        assert (module.sampling, module.workspace_limit) == ("race", 1 << 20)
    assert isinstance(model.kinds[1], Standardized)
    assert isinstance(model.kinds[1], ca.Conv2d)


@pytest.mark.search
@pytest.mark.parametrize("is_converted", [False, True])
def test_each_call_has_the_mode(is_converted: bool) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        model = Net().eval()
        if is_converted:
            ca.convert(model, "race")
        with Watched() as watched:
            model(torch.empty(2, 3, 8, 9))
    # The shared one is called twice.
    expected = ("race", -1) if is_converted else None
    assert watched.calls == [(FORWARD, expected)] * (len(SERVED) + 1)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "LazyConv", "LazyConvTranspose"])
def test_every_layer_of_pytorchs(kind: str, dims: int) -> None:
    name = f"{kind}{dims}d"
    base = getattr(nn, name)
    own = type("Own", (base,), {})
    channels = (4,) if "Lazy" in kind else (3, 4)
    model = nn.ModuleList([base(*channels, 3), own(*channels, 3)])
    x = torch.randn(2, 3, *[6] * dims)
    ca.convert(model, "race")
    assert type(model[0]) is getattr(ca, name)
    assert isinstance(model[1], own)
    for layer in model:
        assert isinstance(layer, getattr(ca, name))
        output = layer(x)
        layer.requires_grad_(False)
        assert layer.sampling == "race"
        assert torch.equal(ca.revert(layer)(x), output)
    assert type(model[0]) is getattr(nn, name.removeprefix("Lazy"))


def test_hooks_stay_and_run(model: Net, x: Tensor) -> None:
    calls: list[str] = []
    for name in ("stem", "kinds.1", "kinds.3"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        module.register_full_backward_hook(lambda *_, name=name: calls.append(f"grad {name}"))
    ca.convert(model)
    model(x).sum().backward()
    assert calls == ["stem", "kinds.1", "kinds.3", "grad kinds.3", "grad kinds.1", "grad stem"]


def test_what_is_ours_already_keeps_its_settings(x: Tensor) -> None:
    model = nn.Sequential(ca.Conv2d(3, 4, 3, sampling="online"), nn.Conv2d(4, 4, 3))
    ca.convert(model, "race")
    assert [module.sampling for module in model] == ["online", "race"]
    before = classes(model)
    ca.convert(model, "sustained")
    assert [module.sampling for module in model] == ["online", "race"]
    assert classes(model) == before


def test_another_mode_for_what_is_served_already_is_a_warning(model: Net) -> None:
    ca.convert(model, sampling="race")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ca.convert(model)
        ca.convert(model, sampling="race")
    for given in ({"sampling": "auto"}, {"sampling": "race", "workspace_limit": 1 << 20}):
        with pytest.warns(UserWarning, match=r"cudnn_autotune\.revert\(model\)") as said:
            ca.convert(model, **given)
        (warning,) = said
        assert warning.filename == __file__
        assert "keep sampling='race'" in str(warning.message)
        for name, value in given.items():
            assert f"{name}={value!r}" in str(warning.message)
    assert {m.sampling for m in model.modules() if isinstance(m, ca.Conv2d)} == {"race"}
    ca.revert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ca.convert(model, sampling="auto")


def replaced_by_a_function(conv: nn.Conv2d) -> Any:
    return lambda input: F.conv2d(input, conv.weight, conv.bias)


def replaced_by_a_method(conv: nn.Conv2d) -> Any:
    def forward(self: nn.Conv2d, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias)

    return types.MethodType(forward, conv)


def wrapped(conv: nn.Conv2d) -> Any:
    before = conv.forward

    @functools.wraps(before)
    def forward(input: Tensor) -> Tensor:
        return before(input) * 1

    return forward


def in_a_closure(conv: nn.Conv2d) -> Any:
    before = conv.forward
    return lambda input: before(input)


def partial(conv: nn.Conv2d) -> Any:
    return functools.partial(lambda before, input: before(input), conv.forward)


def by_its_name(conv: nn.Conv2d) -> Any:
    return lambda input: conv._conv_forward(input, conv.weight, conv.bias)


@pytest.mark.parametrize(
    ("set_forward", "is_served"),
    [
        (replaced_by_a_function, False),
        (replaced_by_a_method, False),
        (wrapped, True),
        (in_a_closure, True),
        (partial, True),
        (by_its_name, True),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_an_instance(set_forward: Any, is_served: bool, when: str, x: Tensor) -> None:
    """It is said to be served where it leads to the forward of the class."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
    if when == "after":
        ca.convert(model)
    model[0].forward = set_forward(model[0])
    ca.convert(model)
    found = ca.conversion(model)
    assert list(found.served) == (["0", "1"] if is_served else ["1"])
    assert ("0" in found.left) != is_served
    ran = []
    fast = vars(ca.Conv2d)["_fast"]
    try:
        ca.Conv2d._fast = staticmethod(lambda *arguments: ran.append(1) or fast(*arguments))
        model(x)
    finally:
        ca.Conv2d._fast = fast
    assert len(ran) == 1 + is_served


def test_a_lazy_module(x: Tensor) -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), OwnLazy(4, 3))
    kinds = classes(model)
    ca.convert(model, "race")
    ca.revert(model)
    assert classes(model) == kinds
    ca.convert(model, "race")
    output = model(x)
    assert type(model[0]) is ca.Conv2d
    assert isinstance(model[1], Plain)
    assert isinstance(model[1], ca.Conv2d)
    assert [module.sampling for module in model] == ["race", "race"]
    ca.revert(model)
    assert classes(model) == [nn.Sequential, nn.Conv2d, Plain]
    assert torch.equal(model(x), output)


# Saving, copying, wrapping.


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "old pickle", "torch.save"])
def test_copies_are_converted_and_can_be_reverted(model: Net, x: Tensor, way: str) -> None:
    kinds, expected = classes(model), model.eval()(x)
    ca.convert(model, "race")
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "torch.save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(model, protocol=0 if way == "old pickle" else None))
    assert classes(twin) == classes(model)
    assert ca.conversion(twin).served == SERVED
    assert twin.kinds[1].sampling == "race"
    assert torch.equal(twin(x), expected)
    ca.revert(twin)
    assert classes(twin) == kinds
    assert ca.conversion(model).served == SERVED, "the original is another model"


def test_revert_restores_everything(model: Net, x: Tensor) -> None:
    kinds, text, names = classes(model), repr(model), [set(vars(m)) for m in model.modules()]
    expected = model(x)
    assert ca.revert(ca.convert(model, "race")) is model
    assert classes(model) == kinds
    assert repr(model) == text
    assert [set(vars(m)) for m in model.modules()] == names
    assert torch.equal(model(x), expected)
    assert ca.revert(model) is model, "a second time nothing is left to do"


def test_revert_makes_a_layer_of_ours_pytorchs(x: Tensor) -> None:
    class Derived(ca.Conv2d):
        pass

    model = nn.Sequential(ca.Conv2d(3, 4, 1, sampling="race"), Derived(4, 4, 1))
    assert classes(ca.revert(model)) == [nn.Sequential, nn.Conv2d, Derived]


def test_a_parametrization_before(x: Tensor) -> None:
    conv = parametrizations.weight_norm(Standardized(3, 4, 3))
    twin, kind, expected = copy.deepcopy(conv), type(conv), conv(x)
    ca.convert(conv, "race")
    assert parametrize.is_parametrized(conv, "weight")
    assert isinstance(conv, ca.Conv2d)
    assert isinstance(conv, Standardized)
    assert torch.equal(conv(x), expected)
    assert type(twin) is kind, "a copy shares the class, and was not converted"
    assert torch.equal(copy.deepcopy(conv)(x), expected)
    ca.revert(conv)
    assert type(conv) is kind
    ca.convert(conv)
    parametrize.remove_parametrizations(conv, "weight")
    assert isinstance(conv, ca.Conv2d)
    assert torch.allclose(conv(x), expected)
    assert type(ca.revert(conv)) is Standardized


def test_a_parametrization_after(x: Tensor) -> None:
    conv = ca.convert(nn.Conv2d(3, 4, 3))
    parametrizations.spectral_norm(conv)
    expected = conv.eval()(x)
    ca.revert(conv)
    assert not isinstance(conv, ca.Conv2d)
    assert torch.equal(conv(x), expected)
    parametrize.remove_parametrizations(conv, "weight")
    assert type(conv) is nn.Conv2d


def test_a_wrapped_model_is_converted_within(model: Net, x: Tensor) -> None:
    wrapped = nn.DataParallel(model)
    assert ca.convert(wrapped) is wrapped
    assert ca.conversion(wrapped).served.keys() == {f"module.{name}" for name in SERVED}


# Compiling and tracing.


def graph_of(model: nn.Module, x: Tensor) -> str:
    """The names of what Dynamo traces, without a graph break."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    (graph,) = graphs
    return " ".join(str(n.target) for n in graph.graph.nodes if n.op == "call_function")


@pytest.mark.search
def test_dynamo_traces_a_forward_of_its_own_without_a_break() -> None:
    with FakeTensorMode():
        conv = Standardized(4, 4, 3, device="cuda")
        ca.convert(conv, "race")
        text = graph_of(conv, torch.empty(2, 4, 8, 8, device="cuda"))
    assert text.count("cudnn_autotune.mark_input aten.conv2d") == text.count("conv") == 1


def test_a_compiled_model_is_compiled_again(model: Net, x: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = compiled(x)
    assert ca.convert(compiled) is compiled
    assert ca.conversion(compiled).served.keys() == {f"_orig_mod.{name}" for name in SERVED}
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), expected)


def test_tools_that_need_revert(model: Net, x: Tensor) -> None:
    """What docs/reference/convert.md lists: each does something else to a converted model."""
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    ca.convert(plain)
    with pytest.raises(NotImplementedError, match=r"cudnn_autotune\.revert\(model\)"):
        torch.jit.script(plain)
    fuse = torch.ao.quantization.fuse_modules
    with pytest.raises(AssertionError, match="did not find fuser method"):
        fuse(plain, [["0", "1", "2"]])
    leaves = [n.target for n in torch.fx.symbolic_trace(plain).graph.nodes if n.op == "call_module"]
    assert "0" not in leaves
    expected = plain(x)
    ca.revert(plain)
    torch.testing.assert_close(torch.jit.script(plain)(x), expected)
    torch.testing.assert_close(fuse(plain, [["0", "1", "2"]])(x), expected)
    leaves = [n.target for n in torch.fx.symbolic_trace(plain).graph.nodes if n.op == "call_module"]
    assert leaves[0] == "0"


# What is said.


def scripted() -> nn.Module:
    return torch.jit.script(nn.Conv2d(3, 3, 1))


def quantized() -> nn.Module:
    return torch.ao.nn.quantized.Conv2d(3, 3, 1)


def with_a_forward_on_the_module() -> nn.Module:
    conv = Standardized(3, 3, 1)
    conv.forward = conv.forward
    return conv


def with_slots() -> nn.Module:
    class Slots(nn.Conv2d):
        def __init_subclass__(cls, *, needed: int) -> None:
            super().__init_subclass__()

    return Slots(3, 3, 1)


def traced_by_fx() -> nn.Module:
    return torch.fx.symbolic_trace(Standardized(3, 3, 1))


LEFT = {
    "fx graph": (traced_by_fx, "it is an fx.GraphModule, which generates its forward"),
    "scripted": (scripted, "it is compiled by torch.jit"),
    "quantized": (quantized, "it is quantized, and runs kernels for integers"),
    "own attribute": (
        lambda: OwnSampling(3, 3, 1),
        "it has an attribute 'sampling' of its own",
    ),
    "forward on the module": (
        with_a_forward_on_the_module,
        "its forward is set on the module, where no class can replace it",
    ),
    "no class": (with_slots, "no class can be made from Slots"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_is_listed(kind: str) -> None:
    make, reason = LEFT[kind]
    model = nn.Sequential(make(), nn.Conv2d(3, 4, 1))
    before = type(model[0])
    ca.convert(model)
    found = ca.conversion(model)
    assert found.served == {"1": "Conv2d"}
    assert found.left.keys() == {"0"}
    assert found.left["0"].startswith(reason)
    assert type(model[0]) is before


def test_what_was_added_later_is_listed(model: Net) -> None:
    ca.convert(model)
    model.later = nn.Conv2d(3, 4, 1)
    assert ca.conversion(model).left == {"later": "it is not converted"}


# What is refused.


def test_nothing_to_convert_is_a_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with pytest.warns(UserWarning, match="Sequential has no convolution that cudnn_autotune can"):
        assert ca.convert(model) is model
    with pytest.warns(UserWarning, match="0: it has an attribute 'sampling'"):
        ca.convert(nn.Sequential(OwnSampling(3, 3, 1)))


@pytest.mark.parametrize("function", [ca.convert, ca.revert, ca.conversion])
def test_no_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        function(lambda x: x)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"sampling": "fastest"}, ValueError, r"sampling.*till_stable"),
        ({"workspace_limit": -1}, ValueError, "workspace_limit"),
        ({"memory_format": "channels_last"}, ValueError, "memory_format must be None, 'auto'"),
        ({"memory_format": torch.preserve_format}, ValueError, "memory_format must be None"),
        ({"memory_format": "auto"}, ValueError, "example_input must be given"),
        ({"memory_format": "auto", "example_input": [1]}, TypeError, "example_input must be a"),
        (
            {"memory_format": "auto", "example_input": {"y": 1}},
            TypeError,
            r"example_input must be the arguments of Net\.forward.*: missing a required",
        ),
        ({"example_input": torch.ones(1)}, ValueError, "example_input is only for"),
    ],
)
def test_bad_arguments_change_nothing(
    model: Net, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    before = classes(model)
    with pytest.raises(error, match=said):
        ca.convert(model, **arguments)
    assert classes(model) == before


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_scripted_model_is_refused(way: str, x: Tensor) -> None:
    conv = nn.Conv2d(3, 4, 1)
    model = torch.jit.script(conv) if way == "script" else torch.jit.trace(conv, x)
    with pytest.raises(ValueError, match=r"model must not be compiled by torch\.jit"):
        ca.convert(model)


def test_an_error_half_way_changes_nothing(model: Net, x: Tensor) -> None:
    model.done = ca.Conv2d(3, 3, 1, sampling="online")
    before, names = classes(model), [set(vars(m)) for m in model.modules()]
    with pytest.raises(RuntimeError, match="expected input"):
        ca.convert(model, "race", memory_format="auto", example_input=torch.randn(2, 5, 8, 8))
    assert classes(model) == before
    assert [set(vars(m)) for m in model.modules()] == names
    assert model.done.sampling == "online"
