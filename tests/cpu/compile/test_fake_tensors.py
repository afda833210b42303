"""Fake kernels: shapes, dtypes and the very strides that the real kernels give.

Fake CUDA tensors need no GPU, so the strides of the CUDA path are checked here too: against
those of PyTorch's own convolution, whose output is channels_last if input or weight is.
"""

from __future__ import annotations

import pytest
import torch
from support.conv.op_cases import CASES, Case, ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def three_results(case: Case, input: Tensor, weight: Tensor, grad_output: Tensor) -> list[Tensor]:
    return [
        ops.conv_fprop(input, weight, None, *case.geometry),
        ops.conv_dgrad(grad_output, weight, list(case.input_shape), *case.geometry),
        ops.conv_wgrad(grad_output, input, list(case.weight_shape), *case.geometry),
    ]


def described(tensors: list[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "groups", "depthwise", "asymmetric"])
def test_cpu_fakes_are_like_the_real_ones(name: str, input_layout: str, weight_layout: str) -> None:
    case = CASES[name]
    input, weight, _, grad_output = case.tensors(dtype=torch.float32, requires_grad=False)
    input = input.contiguous(memory_format=LAYOUTS[input_layout])
    grad_output = grad_output.contiguous(memory_format=LAYOUTS[input_layout])
    weight = weight.contiguous(memory_format=LAYOUTS[weight_layout])
    real = three_results(case, input, weight, grad_output)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (input, weight, grad_output)]
        assert described(three_results(case, *fakes)) == described(real)


@pytest.mark.search
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "groups", "stride"])
def test_cuda_fakes_have_pytorchs_strides(
    name: str, input_layout: str, weight_layout: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    with FakeTensorMode():
        input, weight = (
            torch.empty(shape, device="cuda", dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
            for shape, layout in (
                (case.input_shape, input_layout),
                (case.weight_shape, weight_layout),
            )
        )
        expected = torch.ops.aten.convolution(
            input, weight, None, *case.geometry[:3], False, [0, 0], case.groups
        )
        grad_output = torch.empty_like(expected)  # as a backward gets it, mostly
        expected_grads = torch.ops.aten.convolution_backward(
            grad_output, input, weight, None, *case.geometry[:3], False, [0, 0], case.groups,
            [True, True, False],
        )  # fmt: skip
        actual = three_results(case, input, weight, grad_output)
        assert described(actual) == described([expected, *expected_grads[:2]])
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
def test_meta_tensors(op: str) -> None:
    case = CASES["asymmetric_all"]
    input, weight, _, grad_output = (t.to("meta") for t in case.tensors(requires_grad=False))
    results = dict(
        zip(
            ("conv_fprop", "conv_dgrad", "conv_wgrad"),
            three_results(case, input, weight, grad_output),
            strict=True,
        )
    )
    shapes = {
        "conv_fprop": case.output_shape,
        "conv_dgrad": case.input_shape,
        "conv_wgrad": case.weight_shape,
    }
    assert tuple(results[op].shape) == shapes[op]
    assert results[op].is_meta
    assert results[op].is_contiguous()


def test_symbolic_sizes_stay_symbolic() -> None:
    """One compiled graph serves every batch size and image size."""
    case = CASES["stride"]
    weight = case.tensors(requires_grad=False)[1]
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.conv_fprop(x, weight, None, *case.geometry),
        backend=count,
        dynamic=True,
        fullgraph=True,
    )
    for batch, height, width in ((4, 6, 7), (3, 9, 11), (5, 12, 8)):
        input = torch.randn(batch, 2, height, width, dtype=torch.float64)
        torch.testing.assert_close(compiled(input), case.plain(input, weight))
    assert graphs == 1


def test_bad_shapes_are_refused_while_tracing() -> None:
    with FakeTensorMode():
        input, weight = torch.empty(2, 5, 6, 6), torch.empty(4, 3, 3, 3)
        with pytest.raises(RuntimeError):
            ops.conv_fprop(input, weight, None, [1, 1], [0, 0], [1, 1], 1)
