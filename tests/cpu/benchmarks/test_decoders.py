"""Decoders and encoders of diffusers, converted and by the backend, are PyTorch's.

Inductor's part, which takes minutes on a CPU, is left out: its graphs are run as they are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from models.cases import DECODERS
from support.conv.references import relative_error
from torch import Tensor, nn
from torch.fx import GraphModule

import cudnn_autotune as ca
from cudnn_autotune.compile import programs
from cudnn_autotune.models import memory_format as layouts
from cudnn_autotune.models import padding

pytestmark = pytest.mark.usefixtures("on_cpu")

OPTIONS = {"fuse": "always", "norms": "never", "compare": False, "cpp.weight_prepack": False}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """A tiny one, whose norms scale and shift, and its input."""
    pytest.importorskip("diffusers")
    from models import decoders

    model = decoders.create(name, True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[1:].numel() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(1, *DECODERS[name].tiny[0])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """The graphs that Inductor would get, which run as they are."""
    found: list[GraphModule] = []

    def interpreted(graph: GraphModule, *_: Any, **__: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(programs, "compile_tagged", interpreted)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def called(graphs: list[GraphModule], name: str) -> list[Any]:
    """The arguments of all calls whose operators have a name."""
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return [node.args for node in nodes if node.op == "call_function" and name in str(node.target)]


@pytest.mark.parametrize(
    "name",
    [
        "ltx_decode",
        *(
            pytest.param(f"{name}_{direction}", marks=pytest.mark.slow)
            for name in ("sd", "flux", "qwen", "wan", "cogvideox", "hunyuan")
            for direction in ("decode", "encode")
        ),
    ],
)
def test_graphs_in_channels_last(
    name: str, graphs: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of half types: weights, inputs and concatenations are laid out."""
    monkeypatch.setattr(programs, "favours_channels_last", lambda _: True)
    model, x = made(name)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        options = {"backend": "cudnn_autotune", "dynamic": False, "options": OPTIONS}
        run = model.compiled(lambda part: torch.compile(part, **options))  # type: ignore[operator]
        for _ in range(2):  # a cache of frames begins anew
            assert relative_error(run(x), expected) < 1e-5
    compilations = ca.compilations()[-len(graphs) :]
    assert all(one.chosen == "cudnn_autotune" and not one.note for one in compilations)
    assert all(group.is_fused for one in compilations for group in one.groups)
    assert not called(graphs, "aten.convolution")
    if name.startswith(("wan", "qwen", "sd", "flux")):
        assert not called(graphs, "constant_pad"), "the convolutions pad"
    for x, *_ in called(graphs, "conv_fused"):
        assert "aten.cat" not in str(x.target), "it would be contiguous, and then copied"


@pytest.mark.parametrize("direction", ["decode", pytest.param("encode", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tiled", ["", pytest.param("_tiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["wan", pytest.param("qwen", marks=pytest.mark.slow)])
def test_causal_convolutions_of_this_version_pad_themselves(
    name: str, direction: str, tiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(f"{name}_{direction}{tiled}")
    model, x = model.double(), x.double()
    paddings: list[Any] = []
    convolved = padding.convolved

    def watched(layer: Any, x: Tensor, sizes: Any, own: Any = 0) -> Any:
        paddings.append((type(layer).__name__, tuple(sizes)))
        return convolved(layer, x, sizes, own)

    with torch.no_grad():
        expected = model(x)
        ca.convert(model)
        monkeypatch.setattr(padding, "_is_served", lambda x: x.numel() > 0)
        monkeypatch.setattr(padding, "convolved", watched)
        assert relative_error(model(x), expected) < 1e-12
    classes = {"wan": "WanCausalConv3d", "qwen": "QwenImageCausalConv3d"}
    frames = Counter(sizes[4] for cls, sizes in paddings if cls == classes[name] and sizes[0])
    # Without a cache, and behind one and two cached frames.
    assert set(frames) == ({2, 1, 0} if name == "wan" else {2})


@pytest.mark.parametrize("name", ["wan_decode", "ltx_encode"])
def test_converted_ones_in_channels_last(name: str) -> None:
    """Some weights are of 2-d convolutions, so that ``Module.to`` refuses the layout."""
    model, x = made(name)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        ca.convert(model, memory_format=torch.channels_last)
        assert not ca.conversion(model).left
        assert relative_error(model(x), expected) < 1e-5
    weights = [p for p in model.parameters() if p.dim() == 5 and min(p.shape[:3]) > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last_3d) for p in weights)
    layouts.apply(model, torch.contiguous_format)
    assert all(p.is_contiguous() for p in weights)
