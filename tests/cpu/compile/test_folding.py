"""What scales and shifts a convolution's channels is folded into its weight and bias, in a graph.

The graphs are traced with Inductor's decompositions, and run node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import TOLERANCES, assert_close
from support.models.made import Made
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from cudnn_autotune.compile import judges
from cudnn_autotune.compile.folding import fold, settle
from cudnn_autotune.compile.groups import Group, find_groups
from cudnn_autotune.compile.judges import Judge, Verdict, always, fuse_judged, never

_aten = torch.ops.aten
FOLD = torch.ops.cudnn_autotune.fold_weights.default


class Traced:
    """A model's graph, with its parameters and buffers as placeholders before the input."""

    def __init__(self, model: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> None:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.weights = {name: tensor.detach() for name, tensor in state.items()}
        self.x = x

        def program(*given: Tensor) -> Any:
            named = dict(zip(self.weights, given, strict=False))
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                return functional_call(model, named, (given[-1],))

        with torch.no_grad():
            trace = make_fx(program, select_decomp_table(), tracing_mode="fake")
            self.module: GraphModule = trace(*self.weights.values(), x)
        self.graph = self.module.graph

    def fold(self, judge: Judge = always) -> int:
        """Folds, fuses and settles; returns how many convolutions were folded at first."""
        placeholders = self.graph.find_nodes(op="placeholder")
        foldings = fold(self.graph, placeholders[:-1])
        self.reports = fuse_judged(
            self.module, find_groups(self.graph, select_decomp_table()), judge
        )
        settle(self.graph, foldings)
        self.graph.lint()
        self.module.recompile()
        return len(foldings)

    def __call__(self, x: Tensor | None = None) -> Any:
        with torch.no_grad():
            return self.module(*self.weights.values(), self.x if x is None else x)

    def targets(self) -> list[Any]:
        return [node.target for node in self.graph.nodes if node.op == "call_function"]


def norm(kind: type[nn.Module], channels: int, **options: Any) -> Any:
    made = kind(channels, **options)
    nn.init.normal_(made.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(made.running_var, 0.5, 2)  # type: ignore[arg-type]
    if made.affine:
        nn.init.uniform_(made.weight, -1, 1)  # type: ignore[arg-type]
        nn.init.normal_(made.bias)  # type: ignore[arg-type]
    return made


def following(after: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...]) -> Made:
    """A convolution, and what is computed of its output and of a parameter."""
    return Made(
        lambda model, x: after(model.conv(x), model.operand),
        conv=nn.Conv2d(4, 6, 3),
        operand=nn.Parameter(torch.rand(shape) + 0.5),
    )


@pytest.mark.basic(6)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_is_folded(bias: bool, affine: bool, dtype: torch.dtype) -> None:
    layers = (nn.Conv2d(4, 8, 3, groups=2, bias=bias), norm(nn.BatchNorm2d, 8, affine=affine))
    model = nn.Sequential(*layers, nn.ReLU()).eval().to(dtype)
    x = torch.randn(2, 4, 9, 8).to(dtype)
    traced = Traced(model, x)
    assert traced.fold() == 1
    assert [report.text for report in traced.reports] == ["conv + bias + relu"]
    assert [t for t in traced.targets() if "cudnn_autotune" in str(t)] == [
        FOLD,
        torch.ops.cudnn_autotune.conv_fused.default,
    ]
    assert_close(traced(), model.double()(x.double()), TOLERANCES[dtype])


@pytest.mark.basic(4)
@pytest.mark.parametrize("judge", [always, never("for a test")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.Hardswish()])
def test_an_activation_that_is_computed_in_float32_follows(
    activation: nn.Module, dtype: torch.dtype, judge: Judge
) -> None:
    """Inductor of torch 2.11 removes the conversion to 16 bits between it and the batch norm."""
    layers = (nn.Conv2d(4, 8, 3, bias=False), norm(nn.BatchNorm2d, 8))
    model = nn.Sequential(*layers, activation).eval().to(dtype)
    traced = Traced(model, torch.randn(2, 4, 9, 8).to(dtype))
    convert = torch.ops.prims.convert_element_type.default
    (rounded,) = (
        node
        for node in traced.graph.find_nodes(op="call_function", target=convert)
        if node.args[0].target is _aten.add.Tensor and node.args[1] == dtype
    )
    (widened,) = rounded.users
    widened.replace_input_with(rounded, rounded.args[0])
    traced.graph.erase_node(rounded)
    left = sorted(map(str, traced.targets()))
    assert traced.fold(judge) == 1
    if judge is always:
        (report,) = traced.reports
        assert report.text.startswith("conv + bias + ")
        assert report.is_fused
    else:
        assert sorted(map(str, traced.targets())) == left
    assert_close(traced(), model.double()(traced.x.double()), 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    convolution = getattr(nn, f"Conv{dims}d")(4, 6, 3)
    model = nn.Sequential(convolution, norm(getattr(nn, f"BatchNorm{dims}d"), 6)).eval()
    traced = Traced(model, torch.randn(2, 4, *[7] * dims))
    assert traced.fold() == 1
    torch.testing.assert_close(traced(), model(traced.x))


@pytest.mark.parametrize(
    ("after", "shape"),
    [
        (lambda y, p: y * p, (6, 1, 1)),
        (lambda y, p: p * y + p, (1, 6, 1, 1)),
        (lambda y, p: (y - p) / p, (6, 1, 1)),
        (lambda y, p: y / p / p - p, (6, 1, 1)),
        (lambda y, p: y * p + 1 / p, ()),
        (lambda y, p: y * p.exp().view(6, 1, 1), (6,)),
        (lambda y, p: 0.2 * y, ()),
        (lambda y, p: y / 3 + p - 2, (6, 1, 1)),
        (lambda y, p: 3 + y / p * 2, (6, 1, 1)),
    ],
)
def test_whatever_scales_and_shifts_channels_is_folded(
    after: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    model = following(after, shape)
    traced = Traced(model, torch.randn(2, 4, 9, 8))
    assert traced.fold() == 1
    convolutions = [str(t) for t in traced.targets() if "conv" in str(t) and "prims" not in str(t)]
    assert convolutions == ["cudnn_autotune.conv_fused.default"]
    torch.testing.assert_close(traced(), model(traced.x))


@pytest.mark.parametrize(
    ("after", "shape"),
    [
        (lambda y, p: (y, y * p), (6, 1, 1)),  # the convolution's own output is read too
        (lambda y, p: p - y, (6, 1, 1)),
        (lambda y, p: p / y, (6, 1, 1)),
        (lambda y, p: 2 - y, ()),
        (lambda y, p: 2 / y, ()),
        (lambda y, p: y * p, (7, 6)),  # not a number for each channel
        (lambda y, p: y * y.mean((0, 2, 3), keepdim=True), (6,)),
        (lambda y, p: torch.add(y, p, alpha=2), (6, 1, 1)),
        (lambda y, p: y * torch.rand(6, 1, 1), (6,)),
    ],
)
def test_what_is_something_else_is_left(after: Callable[..., Any], shape: tuple[int, ...]) -> None:
    model = following(after, shape)
    traced = Traced(model, torch.randn(2, 4, 9, 8))
    torch.manual_seed(0)
    expected = model(traced.x)
    assert traced.fold() == 0
    torch.manual_seed(0)
    torch.testing.assert_close(traced(), expected)


INF = float("inf")
QUANTIZED = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("after", "operand", "dtype"),
    [
        # A conversion that loses digits is not seen through.
        (lambda y, p: (y - p) * p.int(), 1.7, torch.float32),
        (lambda y, p: y * p.bool(), 1.7, torch.float16),
        (lambda y, p: y * p.to(QUANTIZED).to(y.dtype), 1.7, torch.float32),
        (lambda y, p: y.to(QUANTIZED).to(y.dtype) * p, 1.7, torch.float16),
        # Vectors that cancel out do not where they are zero, negative or infinite.
        (lambda y, p: y * p / p * p.exp(), 0.0, torch.float32),
        (lambda y, p: y * p.sqrt() * p.sqrt(), -1.0, torch.float32),
        (lambda y, p: (y - p) * (q := p.sigmoid()) + p * q, INF, torch.float32),
        (lambda y, p: (y + p.exp() / p) * p, 0.0, torch.float32),
        # Constants that take weights out of their range.
        (lambda y, p: y * INF + p, 1.0, torch.float32),
        (lambda y, p: y / 0 + p, 1.0, torch.float64),
        (lambda y, p: (y * 1e6 + p).sigmoid(), 1.0, torch.float16),
        (lambda y, p: (y.float() * 1e6 + p).sigmoid().half(), 1.0, torch.float16),
        # A float32 tail that nothing rounds: 2048.5 would be 2048.
        (lambda y, p: y.float() * 0.01 + p, 2048.5, torch.float16),
        (lambda y, p: (y.float() * 0.01 + p).relu().sum(), 2048.5, torch.float16),
    ],
)
def test_numbers_are_not_lost(
    after: Callable[..., Tensor], operand: float, dtype: torch.dtype
) -> None:
    model = following(after, (6, 1, 1))
    nn.init.constant_(model.operand, operand)
    model.conv.to(dtype)
    traced = Traced(model, torch.randn(2, 4, 9, 8).to(dtype))
    traced.fold()
    with torch.no_grad():
        expected = model(traced.x)
    precision = 1e-3 if expected.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(traced(), expected, rtol=precision, atol=precision, equal_nan=True)


def test_a_scale_on_another_device_is_left() -> None:
    """PyTorch multiplies by a number in a tensor, on whatever device that is."""
    with FakeTensorMode():
        weights = (torch.empty(6, 4, 3, 3, device="meta"), torch.empty(()))
        trace = make_fx(lambda w, p, x: F.conv2d(x, w) * p, select_decomp_table())
        graph = trace(*weights, torch.empty(2, 4, 9, 8, device="meta")).graph
    placeholders = graph.find_nodes(op="placeholder")
    assert fold(graph, placeholders[:-1]) == []


def test_transposed_and_unbatched_convolutions_are_left() -> None:
    transposed = nn.Sequential(nn.ConvTranspose2d(4, 4, 3), norm(nn.BatchNorm2d, 4)).eval()
    traced = Traced(transposed, torch.randn(2, 4, 9, 8))
    assert traced.fold() == 0
    torch.testing.assert_close(traced(), transposed(traced.x))
    unbatched = following(lambda y, p: y * p, (6, 1, 1))
    traced = Traced(unbatched, torch.randn(4, 9, 8))
    traced.fold()
    torch.testing.assert_close(traced(), unbatched(traced.x))


class Two(nn.Module):
    """Two convolutions with batch norms; the second's output is added to the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 1)
        self.norms = nn.ModuleList(norm(nn.BatchNorm2d, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x))
        return (y + self.norms[1](self.second(y.relu()))).relu()


def test_the_weights_are_those_of_the_call() -> None:
    """A change of any parameter or buffer is seen, and one operator folds all."""
    model = Two().eval()
    traced = Traced(model, torch.randn(2, 4, 9, 8))
    assert traced.fold() == 2
    assert traced.targets().count(FOLD) == 1
    for tensor in traced.weights.values():  # they share the memory of the model's
        before = traced()
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
            assert (traced() - before).abs().max() > 1e-3
        torch.testing.assert_close(traced(), model(traced.x))


@pytest.mark.parametrize("fused", ["conv + bias", "conv + bias + residual + relu"])
def test_what_is_not_fused_is_not_folded(fused: str) -> None:
    model = Two().eval()
    traced = Traced(model, torch.randn(2, 4, 9, 8))

    def judge(group: Group) -> Verdict:
        return Verdict(group.text == fused, "for a test")

    assert traced.fold(judge) == 2
    assert [report.text for report in traced.reports] == [
        "conv + bias",
        "conv + bias + residual + relu",
    ]
    assert traced.targets().count(_aten.convolution.default) == 1
    assert traced.targets().count(FOLD) == 1
    torch.testing.assert_close(traced(), model(traced.x))


def test_groups_whose_engines_are_compiled_are_judged_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reports are in the graph's order all the same."""
    traced = Traced(Two().eval(), torch.randn(2, 4, 9, 8))
    judged: list[str] = []

    def judge(group: Group) -> Verdict:
        judged.append(group.text)
        return Verdict(True, group.text)

    are_ready = iter([False, True])
    monkeypatch.setattr(judges, "_are_ready", lambda searches: next(are_ready, False))
    assert traced.fold(judge) == 2
    assert judged == ["conv + bias + residual + relu", "conv + bias"]
    assert [(report.text, report.reason) for report in traced.reports] == [
        (text, text) for text in reversed(judged)
    ]


def test_nothing_is_left_of_a_folding_that_is_taken_back() -> None:
    model = Two().eval()
    plain, traced = (Traced(model, torch.randn(2, 4, 9, 8)) for _ in range(2))
    assert traced.fold(never("for a test")) == 2
    assert sorted(map(str, traced.targets())) == sorted(map(str, plain.targets()))
    assert torch.equal(traced(), plain(traced.x))


def test_a_weight_that_autocast_rounds_is_rounded_once() -> None:
    """To bfloat16, after the batch norm is folded into it in float32."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), norm(nn.BatchNorm2d, 8)).eval()
    traced = Traced(model, torch.randn(2, 4, 9, 8), autocast=torch.bfloat16)
    assert traced.fold() == 1
    (together,) = traced.graph.find_nodes(op="call_function", target=FOLD)
    (weight,) = together.args[0]  # type: ignore[misc]
    assert weight.op == "placeholder"  # type: ignore[union-attr]
    assert_close(traced(), model.double()(traced.x.double()), 2 * TOLERANCES[torch.bfloat16])
