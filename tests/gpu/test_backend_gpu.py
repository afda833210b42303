"""``torch.compile(backend="cudnn_autotune")`` on a GPU: right, in one layout, never slower."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.conv.fused_cases import FUNCTIONS, NAMES
from support.conv.references import assert_close, tolerance
from support.models.made import Block
from support.processes.subprocesses import python
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import cudnn_autotune as ca
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning import compiling_ahead

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# The heuristics' engines: these tests ask what is computed, not how fast.
FUSED = {"fuse": "always", "compare": False, "sampling": "heuristic"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def block(
    dtype: torch.dtype = torch.float16,
    layout: torch.memory_format = torch.channels_last,
    activation: str = "relu",
) -> tuple[nn.Module, Tensor, Tensor]:
    """A block, an input, and the output in float64."""
    torch.manual_seed(0)
    model = Block(FUNCTIONS[activation], 64).eval().cuda()
    input = torch.randn(8, 64, 28, 28, device="cuda").to(dtype)
    model = model.to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().cpu()(input.double().cpu())
    return model.to(memory_format=layout), input.to(memory_format=layout), expected


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**FUSED, **options})


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_a_fused_model_is_right(activation: str, dtype: torch.dtype) -> None:
    model, input, expected = block(dtype, activation=activation)
    with torch.no_grad():
        output = compiled(model)(input)
    assert len(last().fused) == 3
    # Three roundings to the dtype follow one another.
    assert_close(output, expected, 3 * tolerance(dtype, True, activation))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("freezing", [False, True])
def test_a_fused_model_needs_no_kernels_but_those_for_its_ends_and_its_weights(
    freezing: bool, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    model, input, expected = block(dtype, layout)
    with torch.no_grad():
        output, codes = run_and_get_code(compiled(model, freezing=freezing), input)
    assert_close(output, expected, 3 * tolerance(dtype, allow_tf32=True))
    assert codes[0].count("conv_fused.default(") == 3
    launches = len(re.findall(r"triton_\w+\.run\(", codes[0]))
    # Inductor runs a contiguous model in channels_last, and copies its input and its output.
    ends = 0 if layout == torch.channels_last else 2
    assert launches == ends
    # The weights and biases of three convolutions are folded by one operator.
    assert codes[0].count("fold_weights.default(") == (not freezing)
    assert output.is_contiguous(memory_format=layout)
    assert "assumed to be not aligned" not in codes[0]


@pytest.mark.compiles
@pytest.mark.parametrize("sampling", ["auto", "race"])
def test_engines_of_all_groups_are_compiled_ahead_and_once(tmp_path: Path, sampling: str) -> None:
    """SiLU is computed by no other engines than those that are compiled at run time."""
    layers: list[nn.Module] = []
    for width in (32, 48, 64):
        layers += [
            nn.Conv2d(16, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 16, 1),
            nn.SiLU(),
        ]
    model = nn.Sequential(*layers).eval().cuda().half().to(memory_format=torch.channels_last)
    input = torch.randn(8, 16, 28, 28, device="cuda", dtype=torch.float16)
    ca.set_store(tmp_path, mode="read_write")
    before = kept_plans.counts()
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(input.double())
        options = {"sampling": sampling, "compare": False}
        output = torch.compile(model, backend="cudnn_autotune", options=options)(input)
    assert_close(output, expected, 6 * tolerance(torch.float16))
    assert len(last().groups) == 6
    after = kept_plans.counts()
    compiled = after["compiled"] - before["compiled"]
    assert compiled == len(list(tmp_path.glob("plans-*/*.plan"))), "nothing is compiled twice"
    assert compiled >= 6
    assert after["read"] == before["read"], "the searches take what was compiled, from memory"


@pytest.mark.compiles
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_engines_of_other_convolutions_are_compiled_ahead(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the problems that the first call searches."""
    begun: list[ca.ConvProblem] = []
    start = compiling_ahead.start

    def recorded(problem: ca.ConvProblem, *arguments: Any, **options: Any) -> None:
        begun.append(problem)
        start(problem, *arguments, **options)

    monkeypatch.setattr(compiling_ahead, "start", recorded)
    conv, up = ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d),
                (nn.Conv3d, nn.ConvTranspose3d))[dims - 1]  # fmt: skip
    model = nn.Sequential(conv(16, 32, 3, bias=False), up(32, 16, 4, 2, 1), nn.Flatten(2))
    input = torch.randn(4, 16, *(24, 20, 12)[:dims], device="cuda", dtype=torch.float16)
    model = model.eval().cuda().half()
    with torch.no_grad():
        program = torch.compile(model, backend="cudnn_autotune", options={"compare": False})
        output = program(input)
        assert_close(output, model.double()(input.double()), 2 * tolerance(torch.float16))
    problems = [choice.problem for choice in ca.choices() if choice.problem.input_shape[0] == 4]
    assert sorted(problem.op for problem in problems) == ["dgrad", "fprop"]
    assert set(problems) <= set(begun)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_program_in_the_other_layout_takes_part(
    is_last: bool, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever program runs is right, and so are its strides."""
    from cudnn_autotune.compile import compiled_graph

    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(convolution(16, 32, 3, padding=1), nn.ReLU(), convolution(32, 16, 1))
    model = model.eval().cuda().half()
    input = torch.randn(4, 16, *[12] * dims, device="cuda", dtype=torch.float16)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    if is_last:
        model, input = model.to(memory_format=layout), input.to(memory_format=layout)
    programs: dict[str, Any] = {}
    compare = compiled_graph.compare

    def compared(given: Any, *rest: Any) -> Any:
        programs.update(given)
        found = compare(given, *rest)
        assert not found.wrong
        for program in given.values():
            (output,) = program(*rest[0])
            assert output.stride() == expected.stride()
        return found

    monkeypatch.setattr(compiled_graph, "compare", compared)
    options = {"fuse": "always", "sampling": "heuristic", "memory_format": "auto"}
    with torch.no_grad():
        expected = model(input)
        output = torch.compile(model, backend="cudnn_autotune", options=options)(input)
    assert_close(output, expected.double(), 2 * tolerance(torch.float16))
    assert output.stride() == expected.stride()
    assert len(programs) == len(last().times_ms) == 3
    assert last().chosen == min(last().times_ms, key=last().times_ms.__getitem__)
    formats = {choice.problem.memory_format for choice in ca.choices()}
    assert formats == {torch.contiguous_format, layout}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_torch_compile(mode: str) -> None:
    model, input, expected = block()
    compiled_model = torch.compile(model, backend="cudnn_autotune", mode=mode)
    with torch.no_grad(), ca.flags("heuristic"):
        for _ in range(4):
            output = compiled_model(input).clone()
        assert_close(output, expected, 3 * tolerance(torch.float16))
    assert len(last().times_ms) == 2


def test_cuda_graphs_of_a_model_with_a_graph_break() -> None:
    """The second graph is not compared where that would overwrite the first one's results."""
    first, input, _ = block()
    second = copy.deepcopy(first)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = first(x)
        torch._dynamo.graph_break()
        return y, second(y)

    compiled_program = torch.compile(program, backend="cudnn_autotune", mode="reduce-overhead")
    outputs: Any = None
    with torch.no_grad(), ca.flags("heuristic"):
        expected = program(input)
        for _ in range(6):
            outputs = compiled_program(input)  # those of the call before are still held
            for one, right in zip(outputs, expected, strict=True):
                assert_close(one, right, 6 * tolerance(torch.float16))
        manager = torch._inductor.cudagraph_trees.get_manager(0)
        recorded = manager.new_graph_id()
        for _ in range(5):
            outputs = compiled_program(input)
        assert manager.new_graph_id().id == recorded.id + 1, "nothing is recorded again"
    records = ca.compilations()[-2:]
    assert [bool(record.times_ms) for record in records] == [True, False]


def test_a_program_is_captured_in_a_cuda_graph() -> None:
    model, input, expected = block()
    program = compiled(model)
    with torch.no_grad():
        program(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = program(input)
        input.copy_(input.clone())
        graph.replay()
    assert_close(output, expected, 3 * tolerance(torch.float16))


def test_a_changed_weight_is_right_in_a_capture_and_after_it() -> None:
    model, input, _ = block()
    program = compiled(model, compare=True, freezing=True)
    with torch.no_grad():
        for _ in range(2):
            program(input)
        model.first.weight.mul_(-1.5)  # type: ignore[operator]
        expected = model(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = program(input)
        graph.replay()
        assert_close(output, expected, 3 * tolerance(torch.float16))
        assert_close(program(input), expected, 3 * tolerance(torch.float16))


@pytest.mark.parametrize("compare", [False, True])
def test_a_change_of_a_weight_is_seen(compare: bool) -> None:
    model, input, _ = block(torch.float32)
    program = compiled(model, compare=compare, freezing=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(program(input), model(input), rtol=1e-2, atol=1e-2)
            model.first.weight.mul_(-1.5)  # type: ignore[operator]
        model.load_state_dict(Block(width=64).state_dict())
        torch.testing.assert_close(program(input), model(input), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("in_captures", ["inductor", "cudnn_autotune"])
def test_a_capture_has_a_program_of_its_own(
    in_captures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the least GPU time, whichever has the fastest calls."""
    from cudnn_autotune.compile import compiled_graph

    compare, build = compiled_graph.compare, compiled_graph.compile_fused
    in_calls = {"inductor": "cudnn_autotune", "cudnn_autotune": "inductor"}[in_captures]
    ran: list[bool] = []

    def compared(*given: Any) -> Any:
        found = compare(*given)
        assert set(found.times_ms) == set(found.gpu_times_ms) == {"inductor", "cudnn_autotune"}
        times = {**found.times_ms, in_calls: 0.0}
        return replace(found, times_ms=times, gpu_times_ms={**found.gpu_times_ms, in_captures: 0.0})

    def counted(*given: Any) -> Any:
        made = build(*given)
        return replace(made, run=lambda *inputs: (ran.append(True), made.run(*inputs))[1])

    monkeypatch.setattr(compiled_graph, "compare", compared)
    monkeypatch.setattr(compiled_graph, "compile_fused", counted)
    model, input, expected = block()
    program = compiled(model, compare=True)
    with torch.no_grad():
        program(input)
        assert (last().chosen, last().chosen_in_captures) == (in_calls, in_captures)
        ran.clear()
        assert_close(program(input), expected, 3 * tolerance(torch.float16))
        assert len(ran) == (in_calls == "cudnn_autotune")
        ran.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = program(input)
        assert len(ran) == (in_captures == "cudnn_autotune")
        graph.replay()
    assert_close(output, expected, 3 * tolerance(torch.float16))


def test_dynamic_sizes() -> None:
    model, _, _ = block()
    program = torch.compile(model, backend="cudnn_autotune", options=FUSED, dynamic=True)
    with torch.no_grad():
        for batch in (2, 5, 9):
            input = torch.randn(batch, 64, 28, 28, device="cuda", dtype=torch.float16)
            input = input.to(memory_format=torch.channels_last)
            torch.testing.assert_close(program(input), model(input), rtol=2e-2, atol=2e-2)
    assert len(last().fused) == 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training(layout: torch.memory_format) -> None:
    theirs, input, _ = block(torch.float32, layout)
    ours = copy.deepcopy(theirs).train()
    compiled(ours)(input).square().mean().backward()
    theirs.train()(input).square().mean().backward()
    assert last().mode == "training"
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(one.grad, other.grad, 2e-2)  # type: ignore[arg-type]
    problems = {choice.problem.op for choice in ca.choices()}
    assert problems == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    convolution = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(convolution(16, 32, 3, padding=1), nn.SiLU(), convolution(32, 16, 1))
    model = model.eval().cuda().half()
    input = torch.randn(2, 16, *[12] * dims, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(input.double())
        output = compiled(model)(input)
    assert [group.text for group in last().fused] == ["conv + bias + silu", "conv + bias"]
    assert_close(output, expected, 2 * tolerance(torch.float16))


TWICE = """
import json, sys, torch, cudnn_autotune as ca
from torch import nn
from cudnn_autotune.timers.stopwatch import Stopwatch
ca.set_store(sys.argv[1], mode="read_write")
torch.manual_seed(0)
parts = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
model = nn.Sequential(*parts, nn.Conv2d(64, 32, 1), nn.SiLU()).cuda().half().eval()
x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16)
with torch.no_grad():
    y = torch.compile(model, backend="cudnn_autotune")(x)
    measured = Stopwatch.uses
    error = (y.double() - model.double()(x.double())).norm() / y.double().norm()
record = ca.compilations()[-1]
groups = [[one.text, one.is_fused, one.reason] for one in record.groups]
origins = {choice.origin for choice in ca.choices()}
said = [[record.source, record.chosen], sorted(origins)]
print(json.dumps([measured, groups, error.item(), said]))
"""


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        done = python("-c", TWICE, str(tmp_path))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (measured, first, _, [[source, chosen], _]), (again, second, error, said) = found
    assert measured > 0
    assert again == 0
    assert len(first) == 2
    assert source == "tuned"
    assert said == [["store", chosen], ["store"]]
    assert second == [[text, fused, f"from the store: {why}"] for text, fused, why in first]
    assert error < 1e-2
