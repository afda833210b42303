"""Training by the backend of ``torch.compile`` on a GPU, with norms as operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from support.norms.models import (
    Dense,
    Projected,
    SmallResNet,
    SqueezeExcite,
    Steps,
    overall_error,
    penalties,
    train,
)
from support.norms.served import is_ours
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import norms as compile_norms
from cudnn_autotune.compile.training_graph import WITHOUT_NORMS
from cudnn_autotune.norms import loading
from cudnn_autotune.norms.plan import NormProblem

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OURS = "cudnn_autotune"
LAYOUTS = [torch.contiguous_format, torch.channels_last]
# The heuristics' engines: these tests ask what is computed, not how fast.
SERVED = {"norms": "always", "compare": False, "sampling": "heuristic"}
NORMS = 9  # of SmallResNet
# How far a step may be away because rounding moves values from one side of a ReLU's 0 to the other.
FLIPS = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**SERVED, **options})


def last() -> ca.Compilation:
    return ca.compilations()[-1]


def images(count: int, batch: int = 16, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 3, size, size, generator=generator).cuda() for _ in range(count)]


def network(layout: torch.memory_format = torch.channels_last) -> SmallResNet:
    torch.manual_seed(0)
    return SmallResNet().cuda().to(memory_format=layout)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype, enabled=dtype != torch.float32)


def under(dtype: torch.dtype, model: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with autocast(dtype):
            output: Tensor = model(x)
        return output

    return call


def parts(steps: Steps) -> dict[str, list[Tensor]]:
    state = steps.state.items()
    return {
        "losses": list(steps.outputs),
        "gradients": list(steps.gradients),
        "running means": [value for name, value in state if name.endswith("running_mean")],
        "running variances": [value for name, value in state if name.endswith("running_var")],
        "parameters": [value for name, value in state if name.endswith(("weight", "bias"))],
    }


def assert_trains_like(
    model: nn.Module, call: Any, dtype: torch.dtype, inputs: list[Tensor]
) -> None:
    """Holds steps of a compiled model to float64, within thrice the error of eager mode."""
    exact = copy.deepcopy(model).double()
    theirs = copy.deepcopy(model)
    ours = train(under(dtype, call), inputs, of=model)
    eager = train(under(dtype, theirs), inputs, of=theirs)
    expected = train(exact, [one.double() for one in inputs])
    for name, value in expected.state.items():
        if name.endswith("num_batches_tracked"):
            assert ours.state[name] == value == len(inputs), name
    for (kind, one), other, right in zip(
        parts(ours).items(), parts(eager).values(), parts(expected).values(), strict=True
    ):
        error, allowed = overall_error(one, right), 3 * overall_error(other, right) + FLIPS[dtype]
        assert error <= allowed, f"{kind}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_are_those_of_float64(
    dtype: torch.dtype, layout: torch.memory_format, cudnn_flags: Callable[..., None]
) -> None:
    cudnn_flags(allow_tf32=False)
    model = network(layout)
    before = ca.fallbacks()
    inputs = [one.to(memory_format=layout) for one in images(5 if dtype == torch.float32 else 2)]
    assert_trains_like(model, compiled(model), dtype, inputs)
    assert [report.is_served for report in last().norms] == [True] * NORMS
    assert ca.fallbacks() == before  # no norm is left to PyTorch's kernels


@pytest.mark.parametrize("make", [Projected, SqueezeExcite])
def test_other_blocks(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().cuda().to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(16, 8, 24, 24, generator=generator).cuda() for _ in range(2)]
    inputs = [one.to(memory_format=torch.channels_last) for one in inputs]
    assert_trains_like(model, compiled(model), torch.bfloat16, inputs)
    assert all(report.is_served for report in last().norms)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_norms_with_activations(
    dtype: torch.dtype, layout: torch.memory_format, cudnn_flags: Callable[..., None]
) -> None:
    cudnn_flags(allow_tf32=False)
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(of, 32, 3, bias=False), nn.BatchNorm2d(32), activation)
        for of, activation in ((3, nn.ReLU(inplace=True)), (32, nn.SiLU()), (32, nn.Identity()))
    ]
    model = nn.Sequential(*blocks).cuda().to(memory_format=layout)
    theirs = copy.deepcopy(model)
    ca.convert(model, sampling="heuristic")
    inputs = [one.to(memory_format=layout) for one in images(3, size=32)]
    before = ca.fallbacks()
    exact = copy.deepcopy(theirs).double()
    ours = train(under(dtype, model), inputs, of=model)
    eager = train(under(dtype, theirs), inputs, of=theirs)
    expected = train(exact, [one.double() for one in inputs])
    assert ca.fallbacks() == before
    for kind, one in parts(ours).items():
        right = parts(expected)[kind]
        error, allowed = overall_error(one, right), overall_error(parts(eager)[kind], right)
        assert error <= 3 * allowed + FLIPS[dtype], f"{kind}: error {error:.3g}"
    assert is_ours(model[0](inputs[0]))
    theirs.load_state_dict(model.state_dict())
    found, wanted = model.eval()(inputs[0]), theirs.eval()(inputs[0])
    assert overall_error([found], [wanted]) <= 1e-4


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.SiLU()], ids=str)
def test_second_derivatives_of_eager_norms(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(32), activation).cuda()
    theirs = copy.deepcopy(model)
    ca.convert(model, sampling="heuristic")  # by the operators, whatever their time
    x = torch.randn(8, 32, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    for found, expected in zip(penalties(model, x), penalties(theirs, x), strict=True):
        assert overall_error([found], [expected]) <= 1e-3


def test_in_cuda_graphs_of_inductor() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = network()
    theirs = copy.deepcopy(model)
    inputs = [one.to(memory_format=torch.channels_last) for one in images(5)]

    def marked(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        output: Tensor = call(x)
        return output

    call = compiled(model, **{"triton.cudagraphs": True})
    ours = train(under(torch.bfloat16, marked), inputs, of=model)
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()
    plain = train(under(torch.bfloat16, compiled(theirs)), inputs, of=theirs)
    assert ours.state["norm.num_batches_tracked"] == len(inputs)
    for kind, one in parts(ours).items():
        assert overall_error(one, parts(plain)[kind]) <= 0.05, kind


def test_in_a_cuda_graph_of_the_caller() -> None:
    model = network()
    (input,) = images(1)
    input = input.to(memory_format=torch.channels_last)
    call = under(torch.bfloat16, compiled(model))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            call(input).backward()
    torch.cuda.current_stream().wait_stream(stream)
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        call(input).backward()
    counted = int(model.norm.num_batches_tracked)  # type: ignore[arg-type]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert model.norm.num_batches_tracked == counted + 3
    found = [parameter.grad for parameter in model.parameters()]
    assert overall_error(found, expected) <= 0.02  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [SmallResNet, SqueezeExcite, Dense])
def test_a_step_takes_no_more_memory(make: Callable[[], nn.Module]) -> None:
    channels, size = (3, 224) if make is SmallResNet else (8, 112)
    input = torch.randn(32, channels, size, size, device="cuda")
    input = input.to(memory_format=torch.channels_last)
    peaks = {}
    for norms in ("never", "always"):
        torch._dynamo.reset()
        model = make().cuda().to(memory_format=torch.channels_last)
        call = under(torch.bfloat16, compiled(model, norms=norms))
        for _ in range(3):
            call(input).sum().backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(input).sum().backward()
        torch.cuda.synchronize()
        peaks[norms] = torch.cuda.max_memory_allocated() - before
    # Masks of outputs behind a residual, workspaces, and what the allocator rounds up.
    assert peaks["always"] <= 1.04 * peaks["never"] + 2**21, peaks


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_both_programs_are_measured(cudagraphs: bool) -> None:
    model = network()
    theirs = copy.deepcopy(model)
    inputs = [one.to(memory_format=torch.channels_last) for one in images(3)]
    seed = torch.cuda.get_rng_state()
    options = {"norms": "measure", "compare": True, "triton.cudagraphs": cudagraphs}
    call = under(torch.bfloat16, compiled(model, **options))
    with torch.no_grad():
        before = copy.deepcopy(model.state_dict())
    torch.compiler.cudagraph_mark_step_begin()
    call(inputs[0]).backward()
    assert last().note == ""
    assert set(last().times_ms) == set(last().gpu_times_ms) == {OURS, WITHOUT_NORMS}
    assert {last().chosen, last().chosen_in_captures} <= {OURS, WITHOUT_NORMS}
    assert {report.is_served for report in last().norms} == {last().chosen == OURS}
    assert model.norm.num_batches_tracked == 1
    assert torch.equal(torch.cuda.get_rng_state(), seed)
    model.load_state_dict(before)
    model.zero_grad(set_to_none=True)

    def marked(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return call(x)

    ours = train(marked, inputs, of=model)
    eager = train(under(torch.bfloat16, theirs), inputs, of=theirs)
    for kind, one in parts(ours).items():
        if kind != "gradients":  # the last steps' are as far apart as rounding takes them
            assert overall_error(one, parts(eager)[kind]) <= 0.05, kind


@pytest.mark.compiles
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_first_step_are_compiled_while_inductor_compiles(
    layout: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, asked = list[NormProblem](), list[NormProblem]()
    start, load = compile_norms.start_compiling, loading.load_plan

    def started(problem: NormProblem, device: int) -> None:
        begun.append(problem)
        start(problem, device)

    def loaded(device: int, form: int, *fields: Any) -> Any:
        asked.append(NormProblem(*fields))
        return load(device, form, *fields)

    monkeypatch.setattr(compile_norms, "start_compiling", started)
    monkeypatch.setattr(loading, "load_plan", loaded)
    width = 24 if layout is torch.channels_last else 40  # of no other test: plans are kept
    model = SmallResNet(width).cuda().to(memory_format=layout)
    with autocast(dtype):
        loss = compiled(model)(images(1, size=72)[0].to(memory_format=layout))
    loss.backward()
    assert {one.is_backward for one in asked} == {False, True}
    assert set(asked) <= set(begun)
