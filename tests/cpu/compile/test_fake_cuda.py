"""The CUDA path of the layers and the functions, without a GPU: on fake CUDA tensors.

What Python does there (padding by name, lists of one, unbatched inputs, what is left to PyTorch)
and what a traced program holds needs no kernel to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import cudnn_autotune as ca

pytestmark = pytest.mark.search


@pytest.fixture(autouse=True)
def fake_mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 9, 8), (6, 4, 3, 3), {}),
    "integers": ((2, 4, 9, 8), (6, 4, 3, 3), {"stride": 2, "padding": 1, "dilation": 2}),
    "pairs": ((2, 4, 9, 8), (6, 4, 3, 2), {"stride": (2, 1), "padding": (0, 2)}),
    "lists": ((2, 4, 9, 8), (6, 4, 3, 2), {"stride": [2, 1], "dilation": [1, 2]}),
    "lists_of_one": ((2, 4, 9, 8), (6, 4, 3, 2), {"stride": [2], "padding": [1]}),
    "numpy_integers": (
        (2, 4, 9, 8),
        (6, 2, 3, 3),
        {
            "stride": np.int64(2),
            "padding": np.int32(1),
            "dilation": np.uint8(2),
            "groups": np.intp(2),
        },
    ),
    "numpy_pairs": (
        (2, 4, 9, 8),
        (6, 4, 3, 2),
        {"stride": tuple(np.array([2, 1])), "padding": list(np.array([0, 2]))},
    ),
    "groups": ((2, 4, 9, 8), (6, 2, 3, 3), {"groups": 2}),
    "same": ((2, 4, 9, 8), (6, 4, 3, 3), {"padding": "same"}),
    "same_even": ((2, 4, 9, 8), (6, 4, 4, 2), {"padding": "same", "dilation": (1, 3)}),
    "valid": ((2, 4, 9, 8), (6, 4, 3, 3), {"padding": "valid", "stride": 2}),
    "unbatched": ((4, 9, 8), (6, 4, 3, 3), {"padding": 1}),
    "unbatched_same": ((4, 9, 8), (6, 4, 2, 2), {"padding": "same"}),
    "zero_batch": ((0, 4, 9, 8), (6, 4, 3, 3), {}),
}


TRANSPOSED_CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 9, 8), (4, 6, 3, 3), {}),
    "integers": (
        (2, 4, 9, 8),
        (4, 6, 3, 3),
        {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2},
    ),
    "pairs": ((2, 4, 9, 8), (4, 6, 3, 2), {"stride": (2, 1), "output_padding": (1, 0)}),
    "lists_of_one": ((2, 4, 9, 8), (4, 6, 3, 2), {"stride": [2], "padding": [1]}),
    "numpy_integers": (
        (2, 4, 9, 8),
        (4, 3, 3, 3),
        {"stride": np.int64(2), "output_padding": np.uint8(1), "groups": np.intp(2)},
    ),
    "output_padding_of_dilation": (
        (2, 4, 9, 8),
        (4, 6, 3, 3),
        {"stride": 2, "dilation": 4, "output_padding": 3},
    ),
    "unbatched": ((4, 9, 8), (4, 6, 3, 3), {"padding": 1}),
    "zero_batch": ((0, 4, 9, 8), (4, 6, 3, 3), {}),
}
EVERY_CALL = {
    **{f"conv2d {name}": call for name, call in CALLS.items()},
    **{f"conv_transpose2d {name}": call for name, call in TRANSPOSED_CALLS.items()},
    "conv1d plain": ((2, 4, 9), (6, 4, 3), {"stride": 2}),
    "conv1d unbatched same": ((4, 9), (6, 4, 4), {"padding": "same"}),
    "conv3d plain": ((2, 4, 9, 8, 7), (6, 4, 3, 3, 3), {"stride": (1, 2, 1)}),
    "conv3d unbatched": ((4, 9, 8, 7), (6, 4, 3, 3, 3), {"padding": 1}),
    "conv3d same": ((2, 4, 9, 8, 7), (6, 4, 3, 4, 2), {"padding": "same"}),
    "conv_transpose1d plain": ((2, 4, 9), (4, 6, 3), {"stride": 2, "output_padding": 1}),
    "conv_transpose3d plain": ((2, 4, 9, 8, 7), (4, 6, 3, 3, 3), {"stride": 2}),
    "conv_transpose3d unbatched": ((4, 9, 8, 7), (4, 6, 3, 3, 3), {"stride": (1, 2, 3)}),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.basic(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", ["neither", "input", "weight", "both"])
@pytest.mark.parametrize("call", EVERY_CALL)
def test_outputs_are_like_pytorchs(call: str, channels_last: str, dtype: torch.dtype) -> None:
    input_shape, weight_shape, keywords = EVERY_CALL[call]
    name = call.split()[0]
    input, weight, bias = (cuda(*shape, dtype=dtype) for shape in (input_shape, weight_shape, [6]))
    if channels_last in ("input", "both") and input.dim() in LAST and "unbatched" not in call:
        input = input.contiguous(memory_format=LAST[input.dim()])
    if channels_last in ("weight", "both") and weight.dim() in LAST:
        weight = weight.contiguous(memory_format=LAST[weight.dim()])
    expected = getattr(nn.functional, name)(input, weight, bias, **keywords)
    actual = getattr(ca.functional, name)(input, weight, bias, **keywords)
    assert actual.shape == expected.shape
    if actual.numel() > 0:
        assert actual.stride() == expected.stride()
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)


BAD_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "strided same": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 2, "same"),
    "unknown padding": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 1, "full"),
    "stride of three": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, (1, 1, 1)),
    "padding of three": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 1, (1, 1, 1)),
    "empty stride": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, ()),
    "fraction": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 1.5),
    "text stride": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, "two"),
    "no tensor": lambda: (cuda(2, 4, 9, 8), [1, 2, 3]),
    "no bias": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), 0.5),
    "channels": lambda: (cuda(2, 5, 9, 8), cuda(6, 4, 3, 3)),
    "groups": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 1, 0, 1, 2),
    "output channels": lambda: (cuda(2, 4, 9, 8), cuda(5, 2, 3, 3), None, 1, 0, 1, 2),
    "kernel too large": lambda: (cuda(2, 4, 2, 2), cuda(6, 4, 3, 3)),
    "rank": lambda: (cuda(9, 8), cuda(6, 4, 3, 3)),
    "text groups": lambda: (cuda(2, 4, 9, 8), cuda(6, 4, 3, 3), None, 1, 0, 1, "two"),
}
BAD_TRANSPOSED_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "padding by name": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), None, 1, "same"),
    "stride of three": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), None, (1, 1, 1)),
    "output padding below 0": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), None, 2, 0, -1),
    "text": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), None, 2, 0, "one"),
    "no tensor": lambda: (cuda(2, 4, 9, 8), [1, 2, 3]),
    "channels": lambda: (cuda(2, 5, 9, 8), cuda(4, 6, 3, 3)),
    "groups": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), None, 1, 0, 0, 3),
    "bias": lambda: (cuda(2, 4, 9, 8), cuda(4, 6, 3, 3), cuda(5)),
    "rank": lambda: (cuda(9, 8), cuda(4, 6, 3, 3)),
}
BAD = {
    **{f"conv2d: {kind}": call for kind, call in BAD_CALLS.items()},
    **{f"conv_transpose2d: {kind}": call for kind, call in BAD_TRANSPOSED_CALLS.items()},
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_calls_are_refused(kind: str) -> None:
    """What PyTorch refuses, with an error of its kinds: nothing of the inner workings shows."""
    for module in (nn.functional, ca.functional):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
            getattr(module, kind.split(":")[0])(*BAD[kind]())
        assert error.type in (RuntimeError, ValueError, TypeError)


KINDS = [f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3)]


def input_of(kind: str) -> Tensor:
    return cuda(*(2, 4, 9, 8, 7)[: 2 + int(kind[-2])])


@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_traces_a_marked_convolution(kind: str) -> None:
    """While a program is exported it is not marked."""
    layer = getattr(ca, kind)(4, 6, 3, device="cuda", sampling="sample_once")
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(input_of(kind))
    calls = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    name = kind.lower().replace("transpose", "_transpose")
    marked = ["cudnn_autotune.mark_input", f"aten.{name}"]
    assert calls == marked + ["cudnn_autotune.mark_output"] * ("Transpose" in kind)


@pytest.mark.basic(4)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("kind", "padding"), [*((kind, 1) for kind in KINDS), ("Conv2d", "same"), ("Conv3d", "same")]
)
def test_what_is_exported_does_without_this_package(
    kind: str, padding: int | str, strict: bool
) -> None:
    """As it is saved, and so as it is loaded, compiled ahead of time or turned into ONNX."""
    layer = getattr(ca, kind)(4, 6, 4, padding=padding, device="cuda", sampling="race")
    program = torch.export.export(layer, (input_of(kind),), strict=strict)
    for graph in (program.graph, program.run_decompositions().graph):
        calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert any(call.startswith("aten.conv") for call in calls)
        assert not any("cudnn_autotune" in call for call in calls)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32], ids=str)
def test_what_cudnn_lacks_is_pytorchs(dtype: torch.dtype) -> None:
    def program(input: Tensor, weight: Tensor) -> Tensor:
        return ca.functional.conv2d(input, weight)

    operands = cuda(2, 4, 9, 8, dtype=dtype), cuda(6, 4, 3, 3, dtype=dtype)
    targets = {str(n.target) for n in make_fx(program)(*operands).graph.nodes}
    assert not any("cudnn_autotune" in target for target in targets)


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_counted_as_pytorchs(groups: int) -> None:
    x, y = cuda(2, 4, 9, 8), cuda(2, 6, 5, 4)
    w = cuda(6, 4 // groups, 3, 3)

    def flops(call: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return int(counter.get_total_flops())

    theirs = flops(lambda: nn.functional.conv2d(x, w, None, 2, 1, 1, groups))
    assert theirs == 2 * 2 * 5 * 4 * 6 * (4 // groups) * 9
    assert flops(lambda: ca.functional.conv2d(x, w, None, 2, 1, 1, groups)) == theirs
    arguments = (y, w, None, 2, 1, (0, 1), groups)
    theirs = flops(lambda: nn.functional.conv_transpose2d(*arguments))
    assert flops(lambda: ca.functional.conv_transpose2d(*arguments)) == theirs > 0


def test_tensors_with_rules_of_their_own_are_pytorchs() -> None:
    """A class that knows ATen's operators only, as DTensor and quantized tensors do."""
    seen = []

    class Wrapped(Tensor):
        inner: Tensor

        @staticmethod
        def __new__(cls, inner: Tensor) -> Wrapped:
            made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype,
                                                 device=inner.device)  # fmt: skip
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            assert function.namespace == "aten"
            inner = [a.inner if isinstance(a, Wrapped) else a for a in args]
            return Wrapped(function(*inner, **(kwargs or {})))

    output = ca.functional.conv2d(Wrapped(cuda(2, 4, 9, 8)), cuda(6, 4, 3, 3), padding=1)
    assert type(output) is Wrapped
    assert seen == ["aten.convolution.default"]
    output = ca.functional.conv_transpose2d(Wrapped(cuda(2, 4, 9, 8)), cuda(4, 6, 3, 3))
    assert type(output) is Wrapped
    assert seen == ["aten.convolution.default"] * 2
    assert type(ca.functional.conv2d(cuda(2, 4, 9, 8), Wrapped(cuda(6, 4, 3, 3)))) is Wrapped
