"""Convolutions that read and write slices of channels, against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.fused_cases import FUNCTIONS
from support.conv.references import relative_error, tolerance
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning.checking import examined

LAST = torch.channels_last
GEOMETRIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((32, 48, 3, 3), {"padding": 1}),
    "1x1": ((64, 48, 1, 1), {}),
    "3 filters": ((3, 48, 3, 3), {"padding": 1}),
    "strided": ((32, 48, 3, 3), {"padding": 1, "stride": 2}),
    "dilated": ((16, 48, 3, 3), {"padding": 2, "dilation": 2}),
    "groups": ((32, 24, 3, 3), {"padding": 1, "groups": 2}),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ADDED = {"": "", "bias": "", "bias residual": "relu", "bias ": "leaky_relu(0.1)"}


def problem_of(name: str, dtype: torch.dtype, added: str) -> ca.ConvProblem:
    weight, geometry = GEOMETRIES[name]
    return ca.ConvProblem(
        *("fprop", (2, 48, 20, 24), weight),
        **geometry,
        dtype=dtype,
        memory_format=LAST,
        bias="bias" in added,
        residual="residual" in added,
        activation=ADDED[added],
        pixel_strides=(112, 96),
    )


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_candidate_writes_its_slice_only(name: str, dtype: torch.dtype, added: str) -> None:
    """The first 24 of cuDNN's, and all others: each is right, and its neighbours in memory are as
    they were."""
    problem = problem_of(name, dtype, added)
    data, right, faults = operands(problem), 0, []
    found = ca.expert.candidates(problem)
    for candidate in [*found[:24], *(one for one in found[24:] if one.engine is None)]:
        try:
            plan = ca.expert.build_plan(problem, candidate.text)
        except ca.PlanError:
            continue
        verdict = examined(problem, candidate.text, plan, data)
        if (verdict.error() or 0.0) <= tolerance(dtype, problem.allow_tf32):
            right += 1
        else:
            faults.append(f"{candidate.text} {verdict.fault()}")
    assert faults == []
    assert right > 0 or ADDED[added].startswith("leaky")  # cuDNN lists none without a compiler


@pytest.mark.parametrize("sampling", ["heuristic", "auto"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_operator(name: str, dtype: torch.dtype, added: str, sampling: str) -> None:
    weight, geometry = GEOMETRIES[name]
    torch.manual_seed(0)
    given = torch.randn(2, 112, 20, 24, device="cuda", dtype=dtype).contiguous(memory_format=LAST)
    x, w = given[:, 32:80], torch.randn(weight, device="cuda", dtype=dtype) / 20
    b = torch.randn(weight[0], device="cuda", dtype=dtype) if "bias" in added else None
    stride, padding, dilation = (
        [geometry.get(key, default)] * 2
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    options = (stride, padding, dilation, geometry.get("groups", 1))
    expected = F.conv2d(x.double(), w.double(), None if b is None else b.double(), *options)
    r = None
    if "residual" in added:
        r = torch.randn_like(expected).to(dtype)
        expected = expected + r
    expected = FUNCTIONS[ADDED[added]](expected)
    batch, kernels, *space = expected.shape
    whole = torch.full((batch, 96, *space), 5.0, device="cuda", dtype=dtype)
    whole = whole.contiguous(memory_format=LAST)
    arguments = (x, w, b, r, *options, ADDED[added], sampling)
    for _ in range(2):
        torch.ops.cudnn_autotune.conv_fused_into_(whole[:, 16 : 16 + kernels], *arguments)
        found = whole[:, 16 : 16 + kernels]
        assert relative_error(found, expected.cpu()) <= tolerance(dtype, True)
        assert (whole[:, :16] == 5).all()
        assert (whole[:, 16 + kernels :] == 5).all()
        found.fill_(5.0)
    dense = torch.ops.cudnn_autotune.conv_fused(*arguments)
    assert relative_error(dense, expected.cpu()) <= tolerance(dtype, True)
    assert dense.is_contiguous(memory_format=LAST)
    texts = [choice.problem.text for choice in ca.choices()]
    assert any("pixel_strides=112,96" in text for text in texts)


@pytest.mark.parametrize("start", [8, 3])
def test_slices_that_are_not_aligned_are_copied(start: int) -> None:
    given = torch.randn(2, 64, 20, 24, device="cuda", dtype=torch.float16)
    given = given.contiguous(memory_format=LAST)
    whole = torch.full((2, 67, 20, 24), 5.0, device="cuda", dtype=torch.float16)
    whole = whole.contiguous(memory_format=LAST)
    x, out = given[:, start : start + 32], whole[:, start : start + 32]
    w = torch.randn(32, 32, 3, 3, device="cuda", dtype=torch.float16) / 20
    torch.ops.cudnn_autotune.conv_fused_into_(out, x, w, None, None, [1, 1], [1, 1], [1, 1], 1)
    expected = F.conv2d(x.double(), w.double(), None, 1, 1)
    assert relative_error(out, expected.cpu()) <= tolerance(torch.float16, True)
    assert (whole[:, :start] == 5).all()
    assert (whole[:, start + 32 :] == 5).all()


@pytest.mark.parametrize("channels", [16, 48])
def test_an_output_of_another_size_is_refused(channels: int) -> None:
    whole = torch.zeros(2, 64, 8, 8, device="cuda", dtype=torch.float16)
    whole = whole.contiguous(memory_format=LAST)
    x, w = whole[:, :32], torch.ones(32, 32, 1, 1, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match="output must be of size"):
        torch.ops.cudnn_autotune.conv_fused_into_(
            whole[:, 16 : 16 + channels], x + 1, w, None, None, [1, 1], [0, 0], [1, 1], 1
        )
    assert (whole == 0).all()


class Dense(nn.Module):
    """A dense block, as in ESRGAN."""

    def __init__(self, channels: int = 64, growth: int = 32) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels + growth * i, growth if i < 4 else channels, 3, padding=1)
            for i in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for conv in self.convs[:4]:
            parts.append(F.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
        result: Tensor = self.convs[4](torch.cat(parts, 1)) * 0.2 + x
        return result


def test_a_dense_block_in_inductors_cuda_graphs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Dense(), Dense()).eval().cuda().half()
    torch._dynamo.reset()  # of sizes that change Dynamo makes symbols
    compiled = torch.compile(model, backend="cudnn_autotune", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(1, 64, 48, 40, device="cuda", dtype=torch.float16)
            expected = model(x)
            output = compiled(x)
            assert relative_error(output, expected.cpu()) <= 2 * tolerance(torch.float16, True)
            assert output.stride() == expected.stride()


def reports_of(model: nn.Module, x: Tensor, fuse: str, layout: torch.memory_format) -> list[Any]:
    """Compares a compiled model of two blocks with float64, called twice and captured; returns what
    became of its concatenations."""
    x = x.contiguous(memory_format=layout)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double()).cpu()
        model = model.half().to(memory_format=layout)
        limit = 1.5 * relative_error(model(x), expected)  # each layer rounds
    torch._dynamo.reset()
    options = {"fuse": fuse, "compare": False}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)
    with torch.no_grad():
        for _ in range(2):
            output = compiled(x)
            assert relative_error(output, expected) <= limit
            assert output.stride() == model(x).stride()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
        graph.replay()
        assert relative_error(captured, expected) <= limit
    reports = ca.compilations()[-1].concatenations
    print(*reports, sep="\n")
    if fuse == "always":
        assert all(report.is_in_place for report in reports)
    else:
        assert all(report.in_place_ms and report.several_ms for report in reports)
    return reports


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("fuse", ["always", "measure"])
def test_a_dense_block_of_the_backend(fuse: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Dense(), Dense()).eval().cuda()
    x = torch.randn(1, 64, 96, 128, device="cuda", dtype=torch.float16)
    assert len(reports_of(model, x, fuse, layout)) == 2


class Normed(nn.Module):
    """Two blocks of a DenseNet, whose concatenations are read by norms."""

    def __init__(self, channels: int = 64, growth: int = 32, layers: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            widths = range(channels, channels + growth * layers, growth)
            self.layers.append(nn.ModuleList(map(self._layer, widths)))
        whole = channels + growth * layers
        self.transition = nn.Sequential(
            nn.BatchNorm2d(whole), nn.ReLU(), nn.Conv2d(whole, channels, 1, bias=False)
        )
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.2)
                nn.init.uniform_(module.running_var, 0.5, 2)

    @staticmethod
    def _layer(channels: int) -> nn.Module:
        return nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 128, 1, bias=False)),
            *(nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            parts = [F.max_pool2d(x, 3, 2, 1)]
            for layer in block:
                parts.append(layer(torch.cat(parts, 1)))
            x = self.transition(torch.cat(parts, 1))
        return x


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("fuse", ["always", "measure"])
def test_norms_read_slices(fuse: str, layout: torch.memory_format) -> None:
    """Some concatenations have more parts than Inductor reads in one kernel."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 56, 48, device="cuda", dtype=torch.float16)
    reports = reports_of(Normed().eval().cuda(), x, fuse, layout)
    assert [report.parts for report in reports] == [10, 10]
