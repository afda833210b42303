"""What Inductor sees of the layers, and what it makes of them, as far as no GPU is needed.

The traced graphs are those of fake CUDA tensors. What Inductor generates is looked at on the CPU,
where the marked convolution is written out by hand.
"""

from __future__ import annotations

import pytest
import torch
from subprocesses import evaluate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import cudnn_autotune as ca

pytestmark = pytest.mark.search


def model(layer: type[nn.Conv2d], **policy: object) -> nn.Module:
    return nn.Sequential(
        layer(8, 16, 3, padding=1, device="cuda", **policy),
        nn.BatchNorm2d(16, device="cuda"),
        nn.ReLU(),
        layer(16, 16, 3, padding="same", groups=16, device="cuda", **policy),
        layer(16, 96, 4, padding="same", device="cuda", **policy),
    ).eval()


def inductors_graph(layer: type[nn.Conv2d], **policy: object) -> GraphModule:
    """As Inductor traces it for inference."""
    from torch._inductor.compile_fx import select_decomp_table

    with FakeTensorMode(), torch.no_grad():
        input = torch.empty(4, 8, 32, 32, device="cuda")
        return make_fx(model(layer, **policy), decomposition_table=select_decomp_table())(input)


def targets(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_inductor_traces_what_it_traces_of_pytorchs_layer() -> None:
    theirs, ours = inductors_graph(nn.Conv2d), inductors_graph(ca.Conv2d)
    assert targets(theirs).count("aten.convolution.default") == 3
    marker = "cudnn_autotune.mark_input.default"
    assert targets(ours).count(marker) == 3
    assert [target for target in targets(ours) if target != marker] == targets(theirs)


@pytest.mark.parametrize("is_inference", [True, False])
def test_inductor_decides_on_the_layout_as_for_pytorchs_layer(is_inference: bool) -> None:
    from torch._inductor.graph import GraphLowering

    theirs, ours = (
        GraphLowering.decide_layout_opt(inductors_graph(layer), is_inference=is_inference)
        for layer in (nn.Conv2d, ca.Conv2d)
    )
    assert ours == theirs
    assert theirs, "else this model tells nothing"


def test_graphs_of_other_policies_differ() -> None:
    """The keys of Inductor's caches are made of the graph's code."""
    codes = {
        graph.code
        for graph in (
            inductors_graph(nn.Conv2d),
            inductors_graph(ca.Conv2d),
            inductors_graph(ca.Conv2d, sampling="race"),
            inductors_graph(ca.Conv2d, sampling="race", workspace_limit=0),
        )
    }
    assert len(codes) == 4


def test_the_marker_keeps_strides() -> None:
    with FakeTensorMode():
        input = torch.empty_strided((2, 3, 5, 7), (400, 1, 60, 5), device="cuda")
        marked = torch.ops.cudnn_autotune.mark_input(input, "race", -1)
    assert marked.stride() == input.stride()


@pytest.mark.parametrize("bias", [False, True])
def test_a_marked_convolution_is_lowered_to_the_operator(bias: bool) -> None:
    from torch._inductor.utils import run_and_get_code

    def program(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        marked = torch.ops.cudnn_autotune.mark_input(x, "median_of_three", 4096)
        y = torch.ops.aten.convolution(marked, w, b, [2, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return y.relu() + torch.ops.aten.convolution(
            x, w, b, [2, 1], [1, 1], [1, 1], False, [0, 0], 1
        )

    torch._dynamo.reset()
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    b = torch.randn(6) if bias else None
    with torch.no_grad():
        output, codes = run_and_get_code(torch.compile(program, fullgraph=True), x, w, b)
    plain = nn.functional.conv2d(x, w, b, (2, 1), 1)
    torch.testing.assert_close(output, plain.relu() + plain)
    calls = [line for line in codes[0].splitlines() if "conv_fprop.default(" in line]
    assert len(calls) == 1
    assert "sampling='median_of_three', workspace_limit=4096" in calls[0]
    assert "mark_input.default(" not in codes[0]
    assert codes[0].count("extern_kernels.convolution(") == 1, "the one that is not marked"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_is_computed_into_the_layout_of_both_operators(
    layout: torch.memory_format,
) -> None:
    """In the traced graph its dimensions lie in another order."""
    from torch._inductor.utils import run_and_get_code

    operators = torch.ops.cudnn_autotune

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


@pytest.mark.parametrize(
    "first", ["cudnn_autotune", "torch._inductor.compile_fx, torch.utils.flop_counter"]
)
def test_torch_is_told_in_either_order_of_imports(first: str) -> None:
    """Inductor knows the decomposition, and the FLOP counter counts every way to call."""
    code = (
        f"import torch; import {first}; import cudnn_autotune as ca\n"
        "from torch._inductor.compile_fx import select_decomp_table\n"
        "assert torch.ops.cudnn_autotune.conv_fprop.default in select_decomp_table()\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FakeTensorMode():\n"
        "    x, w = (torch.empty(s, device='cuda') for s in ((2, 4, 9, 8), (6, 4, 3, 3)))\n"
        "    swapped = torch.nn.Conv2d(4, 6, 3, device='cuda')\n"
        "    swapped.__class__ = ca.Conv2d\n"
        "    layer = ca.Conv2d(4, 6, 3, device='cuda')\n"
        "    for call in (layer, swapped, lambda x: ca.functional.conv2d(x, w)):\n"
        "        with FlopCounterMode(display=False) as counter:\n"
        "            call(x)\n"
        "        print(counter.get_total_flops())"
    )
    flops = 2 * 2 * 7 * 6 * 6 * 4 * 9
    assert evaluate(code).split() == [str(flops)] * 3
