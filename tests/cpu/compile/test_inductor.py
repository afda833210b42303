"""What Inductor sees of the layers, and what it makes of them, as far as no GPU is needed.

The traced graphs are those of fake CUDA tensors. What Inductor generates is looked at on the CPU,
where the marked convolution is written out by hand.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support.models.inductors_graphs import inductors_graphs
from support.processes.subprocesses import evaluate, evaluate_forked
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_autotune as ca
from cudnn_autotune import _C

pytestmark = pytest.mark.search

operators = torch.ops.cudnn_autotune


def model(layers: ModuleType, dims: int = 2, device: str = "cuda", **policy: object) -> nn.Module:
    """Convolutions of all kinds, with PyTorch's layers or ours."""
    plain, transposed = (getattr(layers, f"Conv{kind}{dims}d") for kind in ("", "Transpose"))
    return nn.Sequential(
        plain(8, 16, 3, padding=1, device=device, **policy),
        getattr(nn, f"BatchNorm{dims}d")(16, device=device),
        nn.ReLU(),
        plain(16, 16, 3, padding="same", groups=16, device=device, **policy),
        plain(16, 96, 4, padding="same", device=device, **policy),
        transposed(96, 64, 2, stride=2, device=device, **policy),
        transposed(64, 64, 3, output_padding=1, stride=2, device=device, **policy),
    ).eval()


def graphs_of(
    layers: ModuleType, dims: int = 2, *, is_training: bool = False, **policy: object
) -> list[GraphModule]:
    """Inference is traced for CUDA. Training is traced for the CPU, since autograd asks a GPU for
    its stream."""
    device = "cpu" if is_training else "cuda"
    with FakeTensorMode():
        input = torch.empty(4, 8, *[32, 16, 8][:dims], device=device, requires_grad=is_training)
        return inductors_graphs(model(layers, dims, device, **policy), input)


def inductors_graph(layers: ModuleType, dims: int = 2, **policy: object) -> GraphModule:
    (graph,) = graphs_of(layers, dims, **policy)
    return graph


def targets(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_inductor_traces_what_it_traces_of_pytorchs_layer(dims: int) -> None:
    """But for the uneven padding of one, which its mark has."""
    theirs, ours = inductors_graph(nn, dims), inductors_graph(ca, dims)
    assert targets(theirs).count("aten.convolution.default") == 5
    markers = [f"cudnn_autotune.mark_{what}.default" for what in ("input", "padded", "output")]
    assert [targets(ours).count(marker) for marker in markers] == [4, 1, 2]
    pad = "aten.constant_pad_nd.default"
    assert targets(theirs).count(pad) == 1
    assert [target for target in targets(ours) if target not in markers] == [
        target for target in targets(theirs) if target != pad
    ]
    for graph in (theirs, ours):
        convolutions = graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.convolution.default
        )
        found = [(node.args[3:], node.meta["val"].shape) for node in convolutions]
        assert [arguments[3] for arguments, _ in found] == [False] * 3 + [True] * 2
        if graph is theirs:
            expected = found
    assert found == expected


@pytest.mark.parametrize("is_inference", [True, False])
def test_inductor_decides_on_the_layout_as_for_pytorchs_layer(is_inference: bool) -> None:
    theirs, ours = (
        GraphLowering.decide_layout_opt(inductors_graph(layers), is_inference=is_inference)
        for layers in (nn, ca)
    )
    assert ours == theirs
    assert theirs, "else this model tells nothing"


@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize("is_batched", [True, False])
def test_the_mark_is_next_to_the_convolution(kind: str, is_batched: bool) -> None:
    """Only there the lowering sees it: not in front of what adds a batch, or pads."""
    keywords = {"padding": "same"} if kind == "Conv2d" else {}
    with FakeTensorMode():
        layer = getattr(ca, kind)(8, 16, 4, device="cuda", **keywords)
        size = (4, 8, 9, 8) if is_batched else (8, 9, 8)
        (graph,) = inductors_graphs(layer, torch.empty(size, device="cuda"))
    (convolution,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default
    )
    mark = operators.mark_padded if keywords else operators.mark_input
    assert convolution.args[0].target is mark.default


def test_graphs_of_other_policies_differ() -> None:
    """The keys of Inductor's caches are made of the graph's code."""
    codes = {
        graph.code
        for graph in (
            inductors_graph(nn),
            inductors_graph(ca),
            inductors_graph(ca, sampling="race"),
            inductors_graph(ca, sampling="race", workspace_limit=0),
        )
    }
    assert len(codes) == 4


def test_the_markers_keep_strides() -> None:
    with FakeTensorMode():
        input = torch.empty_strided((2, 3, 5, 7), (400, 1, 60, 5), device="cuda")
        assert operators.mark_input(input, "race", -1).stride() == input.stride()
        assert operators.mark_output(input).stride() == input.stride()


@pytest.mark.basic(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dims", "bias"), [(1, False), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_marked_convolution_is_lowered_to_the_operator(
    bias: bool, transposed: bool, dims: int, dtype: torch.dtype
) -> None:
    stride, ones, output_padding = [2] * dims, [1] * dims, [int(transposed)] * dims
    geometry = (stride, ones, ones, transposed, output_padding, 1)

    def program(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        marked = operators.mark_input(x, "median_of_three", 4096)
        y = torch.ops.aten.convolution(marked, w, b, *geometry)
        return y.relu() + torch.ops.aten.convolution(x, w, b, *geometry)

    torch._dynamo.reset()
    shapes = ((2, 4, *[9, 8, 7][:dims]), (4, 4, *[3] * dims), (4,))
    x, w, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    b = b if bias else None
    with torch.no_grad():
        output, codes = run_and_get_code(torch.compile(program, fullgraph=True), x, w, b)
    plain = torch.ops.aten.convolution(x, w, b, *geometry)
    torch.testing.assert_close(output, plain.relu() + plain)
    assert output.stride() == plain.stride()
    name = "conv_transpose" if transposed else "conv_fprop"
    calls = [line for line in codes[0].splitlines() if f"{name}.default(" in line]
    assert len(calls) == 1
    assert "sampling='median_of_three', workspace_limit=4096" in calls[0]
    assert "mark_input.default(" not in codes[0]
    assert codes[0].count("extern_kernels.convolution(") == 1, "the one that is not marked"


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_single_channel_lies_in_the_layout_of_its_operands(transposed: bool, dims: int) -> None:
    """Its strides fit another order of dimensions too, which no operator computes in."""
    ones, zeros = [1] * dims, [0] * dims
    geometry = (ones, ones, ones, transposed, zeros, 1)

    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        for weight in (v, w):
            marked = operators.mark_input(x, "race", 0)
            x = torch.ops.aten.convolution(marked, weight, None, *geometry)
        return x

    def last(channels: int, *sizes: int) -> Tensor:
        order = (0, dims + 1, *range(1, dims + 1))
        return torch.randn(sizes[0], *sizes[1:], channels).permute(order)

    torch._dynamo.reset()
    x = last(3, 2, *[9, 8, 7][:dims])
    window = [3] * dims
    v = last(1, 3, *window) if transposed else last(3, 1, *window)
    w = last(4, 1, *window) if transposed else torch.randn(4, 1, *window)
    with torch.no_grad():
        output, codes = run_and_get_code(torch.compile(program, fullgraph=True), x, v, w)
    torch.testing.assert_close(output, program(x, v, w))
    assert output.stride() == last(4, 2, *output.shape[2:]).stride()
    assert "empty_strided_cpu(" not in codes[0].split("def call(")[1], "nothing is copied"


class Upsampled(nn.Module):
    """A transposed convolution and a batch norm, written as it is traced on CUDA."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.convolution = getattr(nn, f"ConvTranspose{dims}d")(8, 8, 2, stride=2)
        self.norm = getattr(nn, f"BatchNorm{dims}d")(8)
        for values in (self.norm.weight.data, self.norm.bias.data, self.norm.running_mean):
            values.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        layer, n = self.convolution, x.dim() - 2
        y = torch.ops.aten.convolution(
            operators.mark_input(x, "", -1),
            layer.weight, layer.bias, [2] * n, [0] * n, [1] * n, True, [0] * n, 1,
        )  # fmt: skip
        return self.norm(operators.mark_output(y))


@pytest.mark.basic(1)
@pytest.mark.parametrize("dims", [1, 2])
def test_freezing_does_not_scale_the_input_channels(dims: int) -> None:
    """Inductor of torch 2.11 folds the batch norm wrongly without the marker of the output."""
    torch._dynamo.reset()
    model, input = Upsampled(dims).eval(), torch.randn(2, 8, *[4] * dims)
    # The first freezing in a process decides on the patterns of all later ones, and those that pack
    # weights for a CPU would take convolutions from the backend.
    options = {"freezing": True, "cpp.weight_prepack": False}
    with torch.no_grad(), torch._inductor.config.patch(options):
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(input), model(input))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_backward_of_marked_convolutions_is_ours(dims: int) -> None:
    """Inductor must not see another convolution in it, by which it would decide on a layout."""
    forward, backward = graphs_of(ca, dims, is_training=True, sampling="race")
    assert targets(forward).count("aten.convolution.default") == 5
    assert targets(forward).count("cudnn_autotune.mark_input.default") == 4
    assert targets(forward).count("cudnn_autotune.mark_padded.default") == 1
    assert not any("aten.convolution" in target for target in targets(backward))
    assert not any("pad_nd" in target for target in targets(backward)), "it is the operators'"
    assert targets(backward).count("cudnn_autotune.conv_dgrad.default") == 3
    assert targets(backward).count("cudnn_autotune.conv_fprop.default") == 2, "the transposed ones"
    assert targets(backward).count("cudnn_autotune.conv_wgrad.default") == 5
    for node in backward.graph.nodes:
        if str(node.target).startswith("cudnn_autotune.conv_"):
            assert node.args[-1] == "race"


@pytest.mark.usefixtures("on_cpu")
def test_no_more_is_saved_for_the_backward_than_of_pytorchs_layers() -> None:
    saved = []
    for layers in (nn, ca):
        forward, _ = graphs_of(layers, is_training=True)
        (outputs,) = forward.graph.output_node().args
        kept = [node for node in dict.fromkeys(outputs) if isinstance(node, torch.fx.Node)]
        marks = {operators.mark_input.default, operators.mark_padded.default}
        assert marks.isdisjoint(node.target for node in kept[1:])
        saved.append(sum(n.meta["val"].untyped_storage().nbytes() for n in kept[1:]
                         if isinstance(n.meta["val"], Tensor)))  # fmt: skip
    assert saved[0] >= saved[1] > 0, "no padded tensor"


@pytest.mark.usefixtures("on_cpu")
def test_what_convolutions_read_has_no_padded_strides() -> None:
    """Inductor pads those of other activations that are saved for the backward. Each operator would
    copy what it reads."""
    model = nn.Sequential(
        ca.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        ca.Conv2d(8, 4, 4, padding="same"),
        nn.Hardswish(),
        ca.ConvTranspose2d(4, 4, 1),
    )
    input = torch.randn(2, 3, 35, 33, requires_grad=True)
    torch._dynamo.reset()
    options = {
        "disable_padding_cpu": False,
        "layout_optimization": False,
        "force_disable_caches": True,
    }
    with torch._inductor.config.patch(options):
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_fw_bw_and_get_code(lambda: compiled(input))
    code = "\n".join(codes)
    assert code.count("cudnn_autotune.conv_wgrad.default(") == 3
    assert f"(2, 8, 35, 33), ({8 * 35 * 33}, {35 * 33}, 33, 1)" in code
    padded = -(-35 * 33 // 32) * 32
    assert str(padded) not in code


@pytest.mark.parametrize(
    ("size", "groups", "dtype"),
    [
        (3, 1, torch.float32),
        pytest.param(3, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param(3, 2, torch.float64, marks=pytest.mark.slow),
        (1, 1, torch.float64),
    ],
)
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradients_of_a_marked_convolution(
    transposed: bool, layout: torch.memory_format, size: int, groups: int, dtype: torch.dtype
) -> None:
    """On a CPU PyTorch's convolutions are channels_last in float64 too; the operators are not."""
    geometry = ([2, 1], [size // 2] * 2, [1, 1], transposed, [int(transposed), 0], groups)

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        marked = operators.mark_input(x, "race", -1)
        return torch.ops.aten.convolution(marked, w, b, *geometry).relu()

    torch._dynamo.reset()
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    shapes = ((2, 4, 9, 8), (*channels, size, size), (6,))
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    tensors = [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in tensors]
    leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
    compiled = torch.compile(program, fullgraph=True)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(*leaves[0]))
    assert "extern_kernels.convolution(" not in forward
    assert "convolution(" not in backward
    calls = [line for line in backward.splitlines() if "_autotune.conv_" in line and " = " in line]
    calls.sort(key=lambda line: "conv_wgrad" in line)  # either may come first
    of_input, of_weight = (line.split("default(")[1].split(", ") for line in calls)
    assert of_input[0] == of_weight[int(transposed)], "the gradient is laid out once"
    program(*leaves[1]).sum().backward()
    for mine, right in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", ["inductor", "cudnn_autotune"])
@pytest.mark.parametrize("dims", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_number_stands_for_all_dimensions(dims: int, backend: str) -> None:
    """PyTorch's operators take lists of one number, and so see ``padding="valid"``."""
    plain, transposed = (
        getattr(ca.functional, f"conv{kind}{dims}d") for kind in ("", "_transpose")
    )

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = plain(x, w, b, padding="valid").relu()
        y = plain(y, w, None, [2], (1,), [1]).relu()
        output: Tensor = transposed(y, w, None, (2,), [1], [1], 1, (1,))
        return output

    options = {"fuse": "always", "compare": False} if backend == "cudnn_autotune" else None
    compiled = torch.compile(program, backend=backend, options=options)
    shapes = ((2, 4, *[11, 9, 8][:dims]), (4, 4, *[3] * dims), (4,))
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(compiled(*tensors), program(*tensors))
    leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
    for run, given in zip((compiled, program), leaves, strict=True):
        run(*given).square().sum().backward()
    for mine, right in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_marker_that_runs_carries_the_policy(backend: str) -> None:
    seen = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "convolution" in str(func):
                seen.append(_C.policy_of_call(args[int("backward" in str(func))]))
            return func(*args, **(kwargs or {}))

    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.conv2d(operators.mark_input(x, "race", 8), w)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    x, w = torch.randn(2, 4, 7, 7, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    compiled(x, w)  # traces
    seen.clear()
    with torch._dynamo.config.patch(error_on_recompile=False):
        output = compiled(x, w)
    with Watched():
        output.sum().backward()
    assert seen == [("race", 8)]


@pytest.mark.basic(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_is_computed_into_the_layout_of_both_operators(
    layout: torch.memory_format,
) -> None:
    """In the traced graph its dimensions lie in another order."""

    def program(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        gradient = (g * 2 + 1).permute(0, 3, 2, 1)  # (N, W, H, C) in memory
        arguments = ([1, 1], [1, 1], [1, 1], 1)
        return (
            operators.conv_dgrad(gradient, w, x.shape, *arguments),
            operators.conv_wgrad(gradient, x, w.shape, *arguments),
        )

    torch._dynamo.reset()
    g = torch.randn(2, 8, 9, 6)
    x = torch.randn(2, 4, 9, 8).contiguous(memory_format=layout)
    w = torch.randn(6, 4, 3, 3).contiguous(memory_format=layout)
    outputs, codes = run_and_get_code(torch.compile(program, fullgraph=True), g, x, w)
    for output, expected in zip(outputs, program(g, x, w), strict=True):
        torch.testing.assert_close(output, expected)
    calls = [line for line in codes[0].splitlines() if "_autotune.conv_" in line and " = " in line]
    taken = [line.split("default(")[1].split(",")[0] for line in calls]
    assert len(taken) == 2
    assert taken[0] == taken[1]
    strides = torch.empty(2, 6, 9, 8).contiguous(memory_format=layout).stride()
    assert f"{taken[0]} = empty_strided_cpu((2, 6, 9, 8), {strides}" in codes[0]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["cudnn_autotune", "torch._inductor.compile_fx"])
def test_inductor_is_told_in_either_order_of_imports(first: str) -> None:
    code = (
        f"import torch; import {first}; import cudnn_autotune as ca\n"
        "from torch._inductor.compile_fx import select_decomp_table\n"
        "from torch._inductor import graph, lowering\n"
        "backward = select_decomp_table()[torch.ops.aten.convolution_backward.default]\n"
        "assert 'cudnn_autotune' in backward.__module__\n"
        "assert 'cudnn_autotune' in graph.mark_nodes_dislike_padding.__module__\n"
        "print(torch.ops.cudnn_autotune.mark_input.default in lowering.lowerings)"
    )
    assert evaluate(code) == "True"


def test_a_mode_that_was_never_asked_for_compiles() -> None:
    """Dynamo traces the check of the name, but could not trace the mode's import."""
    code = (
        "import sys, torch, cudnn_autotune as ca\n"
        "layer = ca.Conv2d(3, 4, 3, sampling='sustained')\n"
        "compiled = torch.compile(layer, backend='eager', fullgraph=True)\n"
        "print(tuple(compiled(torch.randn(2, 3, 8, 8)).shape))\n"
        "print('cudnn_autotune.sustained.mode' in sys.modules)"
    )
    assert evaluate_forked(code).splitlines() == ["(2, 4, 6, 6)", "False"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_pads_within_a_transform(transform: str, writes: bool) -> None:
    """The tensors of a transform of torch.func show no memory of their own."""
    conv = nn.Conv2d(4, 6, 3).double()

    def loss(x: Tensor) -> Tensor:
        y = x * 2
        padded = nn.functional.pad(y, (0, 1, 1, 2))
        if writes:
            y.add_(1)
        return conv(padded).square().sum() * y.mean()

    def program(x: Tensor) -> Tensor:
        if transform == "grad":
            return torch.func.grad(loss)(x)
        output: Tensor = torch.func.jvp(loss, (x,), (x.cos(),))[1]
        return output

    options = {"fuse": "always", "compare": False}
    compiled = torch.compile(program, backend="cudnn_autotune", options=options)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), program(x))
