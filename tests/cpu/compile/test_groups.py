"""Groups of a convolution, residual addition and activation are found in graphs, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.conv.fused_cases import FUNCTIONS
from support.conv.references import CONVOLUTIONS, TOLERANCES, assert_close
from support.models.inductors_graphs import inductors_graphs
from torch import Tensor, nn
from torch._inductor.compile_fx import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import cudnn_autotune as ca
from cudnn_autotune.compile import judges
from cudnn_autotune.compile.groups import Group, find_groups, fuse_groups

FUSED = torch.ops.cudnn_autotune.conv_fused.default
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def decompositions() -> dict[object, Callable[..., object]]:
    return select_decomp_table()


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    """The function as Inductor gets it, of operators that write nothing."""
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    with torch.no_grad():
        return make_fx(functional, decomposition_table=decompositions(), tracing_mode="fake")(
            *inputs
        )


def groups_of(function: Callable[..., object], *inputs: Tensor) -> list[Group]:
    return find_groups(traced(function, *inputs).graph, decompositions())


def texts(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    return [group.text for group in groups_of(function, *inputs)]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 9, 8), (6, 4, 3, 3), (6,), (2, 6, 9, 8))
    x, w, b, r = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return x, w, b, r


@pytest.mark.basic(14)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_a_group_becomes_one_operator(
    activation: str, has_residual: bool, dtype: torch.dtype
) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        y = F.conv2d(x, w, b, padding=1)
        return FUNCTIONS[activation](y + r if has_residual else y)

    inputs = operands(dtype)
    graph = traced(program, *inputs)
    found = find_groups(graph.graph, decompositions())
    (group,) = found
    assert group.obstacle is None
    assert (group.activation, group.residual is not None) == (activation, has_residual)
    fuse_groups(graph.graph, found)
    graph.graph.lint()
    graph.recompile()
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [FUSED]
    expected = program(*(tensor.double() for tensor in inputs))
    assert_close(graph(*inputs), expected, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_prelu_of_each_channel_is_fused(dims: int, has_residual: bool, dtype: torch.dtype) -> None:
    def program(x: Tensor, w: Tensor, r: Tensor, s: Tensor) -> Tensor:
        y = CONVOLUTIONS[dims](x, w, padding=1)
        return F.prelu(y + r if has_residual else y, s)

    torch.manual_seed(0)
    shapes = ((2, 4, *[7] * dims), (6, 4, *[3] * dims), (2, 6, *[7] * dims), (6,))
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    graph = traced(program, *inputs)
    (group,) = found = find_groups(graph.graph, decompositions())
    assert group.text == "conv + residual + prelu" if has_residual else "conv + prelu"
    assert group.problem().activation == "prelu"
    fuse_groups(graph.graph, found)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [FUSED]
    assert_close(graph(*inputs), program(*(t.double() for t in inputs)), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("shape", "is_fused"),
    [
        ((6, 1, 1), True),
        ((1, 6, 1, 1), True),
        ((1, 1, 1, 1), False),
        ((2, 6, 1, 1), False),
        ((9, 1), False),
        ((6,), False),
        ((1, 6, 9, 6), False),
        ((2, 6, 9, 6), False),
    ],
)
def test_prelu_has_a_slope_for_each_channel_and_nothing_else(
    shape: tuple[int, ...], is_fused: bool
) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Tensor:
        y = F.conv2d(x, w, b, padding=(1, 0))
        return torch.where(y > 0, y, y * s)

    torch.manual_seed(0)
    inputs = (*operands()[:3], torch.randn(shape))
    graph = traced(program, *inputs)
    (group,) = found = find_groups(graph.graph, decompositions())
    assert group.activation == ("prelu" if is_fused else "")
    fuse_groups(graph.graph, found)
    graph.graph.lint()
    graph.recompile()
    assert_close(graph(*inputs), program(*(t.double() for t in inputs)), TOLERANCES[torch.float32])


@pytest.mark.parametrize("is_first", [True, False])
def test_the_output_of_another_group_is_a_slope(is_first: bool) -> None:
    """The gate of a single image has one number for each channel, as slopes have."""

    def program(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        gate = lambda: F.conv2d(x.mean((2, 3), keepdim=True), v, b).sigmoid()  # noqa: E731
        slope = gate() if is_first else None
        y = F.conv2d(x, w, b)
        return torch.where(y > 0, y, y * (gate() if slope is None else slope))

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((1, 4, 9, 8), (6, 4, 3, 3), (6, 4, 1, 1), (6,))]
    graph = traced(program, *inputs)
    found = find_groups(graph.graph, decompositions())
    assert {group.text for group in found} == {"conv + bias + prelu", "conv + bias + sigmoid"}
    fuse_groups(graph.graph, found)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), program(*inputs))


def test_a_value_is_no_slope_of_itself() -> None:
    x, w, b = (torch.randn(shape) for shape in ((1, 4, 3, 3), (6, 4, 3, 3), (6,)))
    program = lambda x, w, b: torch.where((y := F.conv2d(x, w, b)) > 0, y, y * y)  # noqa: E731
    assert texts(program, x, w, b) == ["conv + bias"]


def test_slopes_of_another_dtype_are_left() -> None:
    x, w, b, _ = operands(torch.float16)
    s = torch.randn(6, 1, 1)
    program = lambda x, w, b, s: torch.where((y := F.conv2d(x, w, b)) > 0, y, y * s)  # noqa: E731
    assert texts(program, x, w, b, s) == ["conv + bias"]


@pytest.mark.parametrize(
    ("spelling", "activation"),
    [
        (lambda y: y * torch.sigmoid(y), "silu"),
        (lambda y: torch.sigmoid(y) * y, "silu"),
        (lambda y: y * F.relu6(y + 3) / 6, "hardswish"),
        (lambda y: y.relu_(), "relu"),
        (lambda y: F.silu(y, inplace=True), "silu"),
        (lambda y: nn.functional.hardswish(y, inplace=True), "hardswish"),
        (lambda y: y.clamp(0, 6), "relu6"),
        (lambda y: F.hardtanh(y, 0, 6), "relu6"),
        (lambda y: y.tanh_(), "tanh"),
        (lambda y: y * torch.tanh(F.softplus(y)), "mish"),
        (lambda y: F.leaky_relu(y), "leaky_relu(0.01)"),
        (lambda y: F.leaky_relu(y, 0.2, inplace=True), "leaky_relu(0.2)"),
        (lambda y: torch.where(y > 0, y, y * 0.3), "leaky_relu(0.3)"),
        (lambda y: torch.where(y > 0, y, 2 * y), "leaky_relu(2)"),
        (lambda y: F.elu(y), "elu(1)"),
        (lambda y: F.elu(y, 2, inplace=True), "elu(2)"),
        (lambda y: F.celu(y), "elu(1)"),
        (lambda y: torch.where(y > 0, y, torch.expm1(y) * 0.5), "elu(0.5)"),
        (lambda y: y.clamp_min(0.1), ""),
        (lambda y: y.clamp(0, 5), ""),
        (lambda y: y.clamp(-6, 6), ""),
        (lambda y: F.leaky_relu(y, -0.1), ""),
        (lambda y: F.leaky_relu(y, 1e-5), ""),
        (lambda y: torch.where(y > 1, y, y * 0.3), ""),
        (lambda y: torch.where(y > 0, y * 0.3, y), ""),
        (lambda y: torch.where(y > 0, y, y.flip(0) * 0.3), ""),
        (lambda y: F.selu(y), ""),
        (lambda y: F.celu(y, 0.5), ""),
        (lambda y: y * torch.tanh(F.softplus(y, 2)), ""),
        (lambda y: y * torch.sigmoid(2 * y), ""),
        (lambda y: y * torch.sigmoid(y.flip(0)), ""),
    ],
)
def test_activations_by_other_words_and_what_only_looks_like_one(
    spelling: Callable[[Tensor], Tensor], activation: str
) -> None:
    x, w, b, _ = operands()
    (group,) = groups_of(lambda x, w, b: spelling(F.conv2d(x, w, b)), x, w, b)
    assert group.activation == activation


def test_a_residual_is_taken_on_either_side_and_in_place() -> None:
    expected = ["conv + bias + residual"]
    assert texts(lambda x, w, b, r: F.conv2d(x, w, b, padding=1) + r, *operands()) == expected
    assert texts(lambda x, w, b, r: r + F.conv2d(x, w, b, padding=1), *operands()) == expected
    in_place = lambda x, w, b, r: F.conv2d(x, w, b, padding=1).add_(r)  # noqa: E731
    assert texts(in_place, *operands()) == expected


@pytest.mark.parametrize(
    "addend",
    [
        lambda y, r: r[:1],  # a broadcast
        lambda y, r: r[:, :1],
        lambda y, r: r.double(),
        lambda y, r: 2.0,
        lambda y, r: y,
        lambda y, r: y.exp(),  # a second use of the convolution's output
    ],
)
def test_other_additions_are_no_residual(addend: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        y = F.conv2d(x, w, b, padding=1)
        return y + addend(y, r)

    assert texts(program, *operands()) == ["conv + bias"]


def test_a_scaled_addition_is_no_residual() -> None:
    program = lambda x, w, b, r: torch.add(F.conv2d(x, w, b, padding=1), r, alpha=2)  # noqa: E731
    assert texts(program, *operands()) == ["conv + bias"]


def test_a_value_that_is_used_elsewhere_is_kept() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, w, b, padding=1) + r
        return y.relu(), y.exp()

    assert texts(program, *operands()) == ["conv + bias + residual"]


def test_the_later_of_two_convolutions_takes_their_sum() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        first = F.conv2d(x, w, b)
        second = F.conv2d(x, w.flip(0), None)
        return (first + second).relu()

    inputs = operands()[:3]
    graph = traced(program, *inputs)
    found = find_groups(graph.graph, decompositions())
    assert [group.text for group in found] == ["conv + bias", "conv + residual + relu"]
    first, second = found
    assert second.residual is first.output
    fuse_groups(graph.graph, found)
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), program(*inputs))


def test_the_output_of_a_later_group_is_a_residual() -> None:
    """A shortcut may be computed first."""

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        shortcut = F.conv2d(x, w, b)
        return (shortcut + F.conv2d(x, w.flip(0), b).relu()).tanh()

    inputs = operands()[:3]
    graph = traced(program, *inputs)
    found = find_groups(graph.graph, decompositions())
    assert [group.text for group in found] == [
        "conv + bias + residual + tanh",
        "conv + bias + relu",
    ]
    fuse_groups(graph.graph, found)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), program(*inputs))


def test_a_convolution_by_itself_is_in_no_group() -> None:
    x, w, _, _ = operands()
    found = groups_of(lambda x, w: F.conv2d(x, w).exp(), x, w)
    assert [(group.text, group.obstacle) for group in found] == [
        ("conv", "no bias, residual or activation follows that it could compute")
    ]


def test_a_transposed_convolution_is_in_no_group() -> None:
    x = torch.randn(2, 4, 9, 8)
    w, b = torch.randn(4, 6, 3, 3), torch.randn(6)
    found = groups_of(lambda x, w, b: F.conv_transpose2d(x, w, b).relu(), x, w, b)
    assert [(group.text, group.obstacle) for group in found] == [("conv", "it is transposed")]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_transposed_convolution_is_a_gradient_of_the_input(dims: int) -> None:
    convolution = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    x, w, b = torch.randn(2, 4, *(7, 6, 5)[:dims]), torch.randn(4, 6, *[3] * dims), torch.randn(12)

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolution(x, w, b, stride=2, padding=1, output_padding=1, groups=2)

    (group,) = groups_of(program, x, w, b)
    problem = group.problem()
    assert (problem.op, problem.bias, problem.groups) == ("dgrad", False, 2)
    assert problem.input_shape == program(x, w, b).shape
    assert problem.weight_shape == w.shape
    assert problem.output_shape == x.shape


def test_a_transposed_convolution_of_length_1_runs_as_the_operator_takes_it() -> None:
    """Such an input may be contiguous and an image in channels_last at once."""
    x, w = torch.randn(2, 1, 8).transpose(1, 2), torch.randn(8, 6, 3)
    assert x.is_contiguous()
    (group,) = groups_of(F.conv_transpose1d, x, w)
    problem = group.problem()
    assert problem.input_shape == (2, 6, 1, 3)
    assert problem.memory_format == torch.channels_last


@pytest.mark.search
def test_engines_of_what_is_not_fused_begin_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines of the first layer come first; those of PyTorch's own layers do not begin."""

    def model() -> nn.Module:
        policy = {"sampling": "race", "workspace_limit": 4096}
        ups = [ca.ConvTranspose2d(8, 8, 2, 2, **policy) for _ in range(2)]
        return nn.Sequential(*ups, nn.ConvTranspose2d(8, 4, 2, 2))

    begun: list[tuple[tuple[float, ...], tuple[object, ...]]] = []

    def start(*search: object, place: tuple[float, ...]) -> None:
        begun.append((place, search))

    monkeypatch.setattr(judges.compiling_ahead, "start", start)
    graph = fake_cuda_graph(model)
    groups = find_groups(graph.graph, decompositions())
    judges.fuse_judged(graph, groups, judges.always)
    assert begun == []
    judges.fuse_judged(graph, groups, judges.Measured())
    shapes = []
    for _, (problem, device, *policy) in sorted(begun, key=lambda one: one[0]):
        assert isinstance(problem, ca.ConvProblem)
        assert (problem.op, str(device), *policy) == ("dgrad", "cuda:0", "race", 4096)
        shapes.append(problem.input_shape)
    assert shapes == [(4, 8, 64, 64), (4, 8, 128, 128)]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_every_number_of_dimensions(dims: int) -> None:
    convolution = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    size = (7, 6, 5)[:dims]
    x, w, b = torch.randn(2, 4, *size), torch.randn(6, 4, *[3] * dims), torch.randn(6)

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolution(x, w, b, stride=2, padding=1).relu()

    (group,) = groups_of(program, x, w, b)
    problem = group.problem()
    assert problem.output_shape == program(x, w, b).shape
    assert (problem.bias, problem.residual, problem.activation) == (True, False, "relu")


def test_a_group_is_stored_where_more_than_pointwise_operators_read_it() -> None:
    x, w, b, _ = operands()
    weight = torch.randn(6, 6, 1, 1)

    def stored(after: Callable[[Tensor, Tensor], object]) -> list[bool]:
        def program(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> object:
            return after(F.conv2d(x, w, b).relu(), v)

        groups = groups_of(program, x, w, b, weight)
        return [group.is_stored for group in groups if group.obstacle is None]

    assert stored(lambda y, v: y) == [True]
    assert stored(lambda y, v: y.exp()) == [False]
    assert stored(lambda y, v: y.mean((2, 3))) == [False]
    assert stored(lambda y, v: torch.cat((y, y.exp()), 1)) == [False]
    assert stored(lambda y, v: y.flatten(2) @ y.flatten(2).mT) == [True]
    assert stored(lambda y, v: F.conv2d(y, v)) == [True]
    # The addition is part of another operator.
    assert stored(lambda y, v: F.conv2d(y.exp(), v) + y) == [True, True]


def test_a_kept_verdict_holds_for_equal_settings() -> None:
    """They are the policy of a layer without one."""
    graph = fake_cuda_graph(lambda: nn.Sequential(ca.Conv2d(8, 16, 3), nn.ReLU()))
    (group,) = find_groups(graph.graph, decompositions())
    assert group.policy == ("", -1)
    forms = judges._forms_of(group)
    assert not isinstance(forms, str)
    known = judges._name(forms)
    assert judges._name(forms) == known
    names = [known]
    for change in ({"sampling": "heuristic"}, {"sampling": "race"}, {"workspace_limit": 0}):
        with ca.flags(**change):  # type: ignore[arg-type]
            names.append(judges._name(forms))
    assert len(set(names)) == len(names)


def fake_cuda_graph(
    model: Callable[[], nn.Module], layout: torch.memory_format = torch.contiguous_format
) -> GraphModule:
    with FakeTensorMode(), torch.device("cuda"):
        (graph,) = inductors_graphs(model(), torch.empty(4, 8, 32, 32, memory_format=layout))
    return graph


@pytest.mark.search
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_policy_of_a_layer_is_its_groups(layout: torch.memory_format) -> None:
    def model() -> nn.Module:
        layer = ca.Conv2d(8, 16, 3, padding=1, sampling="race", workspace_limit=4096)
        return nn.Sequential(layer, nn.SiLU())

    graph = fake_cuda_graph(model, layout)
    (group,) = find_groups(graph.graph, decompositions())
    assert group.policy == ("race", 4096)
    problem = group.problem()
    assert problem.memory_format == layout
    (moved,) = find_groups(graph.graph, decompositions(), channels_last=True)
    assert moved.problem().memory_format == torch.channels_last
    assert (problem.dtype, problem.activation) == (torch.float32, "silu")
    fuse_groups(graph.graph, [group])
    (fused,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert fused.target is FUSED
    assert fused.args[-3:] == ("silu", "race", 4096)


@pytest.mark.search
def test_pytorchs_own_layer_is_left_alone_on_cuda() -> None:
    graph = fake_cuda_graph(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()))
    found = find_groups(graph.graph, decompositions())
    assert [(group.text, group.obstacle) for group in found] == [("conv", "it is PyTorch's own")]


def test_symbolic_sizes_stand_for_those_of_the_first_call() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return (F.conv2d(x, w, b, padding=1) + r).relu()

    with torch.no_grad():
        graph = make_fx(program, decomposition_table=decompositions(), tracing_mode="symbolic")(
            *operands()
        )
    (group,) = find_groups(graph.graph, decompositions())
    assert group.text == "conv + bias + residual + relu"
    assert group.problem().input_shape == (2, 4, 9, 8)
