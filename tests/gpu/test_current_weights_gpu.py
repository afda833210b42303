"""A compiled inference computes with the weights that the model has at the call, on a GPU: after
fused optimizers, replayed training steps, and writes that PyTorch counts no version for."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from support.conv.references import assert_close, tolerance
from support.models.weight_changes import statistics, swapped, trained_by
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import cudnn_autotune as ca

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# The heuristics' engines: these tests ask what is computed, not how fast.
FUSED = {"fuse": "always", "sampling": "heuristic"}
CLOSE = 1e-2  # float32 is computed in TF32


def network() -> nn.Sequential:
    layers = (nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16)).eval().cuda()


def image() -> Tensor:
    return torch.randn(4, 16, 12, 12, device="cuda")


def loaded(model: Any, x: Tensor) -> None:
    model.load_state_dict(network().state_dict())


def together(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model[0].weight, model[3].weight], -1.5)


def merged(model: Any, x: Tensor) -> None:
    """As PEFT merges an adapter of a convolution into its weight."""
    model[0].weight.data += torch.randn_like(model[0].weight)


CHANGES = {
    "fused Adam": trained_by(torch.optim.Adam, fused=True),
    "fused AdamW": trained_by(torch.optim.AdamW, fused=True),
    "fused SGD": trained_by(torch.optim.SGD, fused=True, momentum=0.9),
    "statistics": statistics,
    "swapped": swapped,
    "loaded": loaded,
    "foreach": together,
    "merged": merged,
}


@pytest.mark.parametrize("compare", [False, True])
def test_every_change_is_seen_by_the_next_call_and_the_next_replay(compare: bool) -> None:
    model, x = network(), image()
    options = {**FUSED, "compare": compare}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)
    initial = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
    for name, change in CHANGES.items():
        model.load_state_dict(initial)
        with torch.no_grad():
            before = compiled(x)
        change(model, x)
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(x.double())
            assert (expected - before).norm() > 0.05 * expected.norm(), name
            assert_close(compiled(x), expected, CLOSE, name)
            graph.replay()
            assert_close(captured, expected, CLOSE, f"{name}, replayed")
    assert not ca.compilations()[-1].is_frozen


def test_a_training_step_that_is_replayed_is_seen() -> None:
    model, x = network(), image()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True, capturable=True)
    compiled = torch.compile(model, backend="cudnn_autotune", options=FUSED)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        (model(x) - 1).square().mean().backward()
        optimizer.step()

    model.train()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        for _ in range(5):
            graph.replay()
        model.eval()
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(compiled(x), expected, CLOSE)
        model.train()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_weights_of_many_sizes_are_folded_by_few_kernels(layout: torch.memory_format) -> None:
    layers: list[nn.Module] = []
    for i in range(12):
        kernel = 1 + 2 * (i % 2)
        norm = nn.BatchNorm2d(24 + 8 * i)
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        conv = nn.Conv2d(16 + 8 * i, 24 + 8 * i, kernel, padding=kernel // 2, bias=False)
        layers += [conv, norm, nn.ReLU()]
    model = nn.Sequential(*layers).eval().cuda().half().to(memory_format=layout)
    x = image().half().to(memory_format=layout)
    options = {**FUSED, "compare": False}
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        compiled = torch.compile(model, backend="cudnn_autotune", options=options)
        output, codes = run_and_get_code(compiled, x)
    assert codes[0].count("conv_fused.default(") == 12
    launches = len(re.findall(r"triton_\w+\.run\(", codes[0]))
    assert launches <= 6, "of 24 weights and biases, and of the ends of the graph"
    assert_close(output, expected, 12 * tolerance(torch.float16))
