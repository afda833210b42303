"""On a GPU: engines that cuDNN compiles at run time are compiled once, not in each process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from support.processes.subprocesses import evaluate
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import checked_outputs, kept_plans
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.measuring import operands, run_operator
from cudnn_autotune.tuning import prefetching

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("folder")]

ALLOWED = 2e-2
# SiLU is computed by no other engines than those that are compiled.
FUSED = ca.ConvProblem(
    "fprop",
    (4, 32, 20, 20),
    (48, 32, 3, 3),
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
    bias=True,
    activation="silu",
)


def compiled(problem: ca.ConvProblem) -> list[ca.expert.Candidate]:
    return [
        c
        for c in ca.expert.candidates(problem, device="cuda")
        if c.is_compiled and c.engine is not None
    ]


def builds(problem: ca.ConvProblem) -> ca.expert.Candidate:
    """The first compiled candidate that builds."""
    search = open_search(problem)
    for candidate in compiled(problem):
        with suppress(ca.CudnnError):
            search.build(candidate.text)
            return candidate
    pytest.skip("none of the engines that are compiled builds")


def remember(folder: Path, problem: ca.ConvProblem, candidate: ca.expert.Candidate) -> None:
    """Stores a decision for the candidate, as if it had won."""
    selection = Selection((Measurement(candidate, 0.1, 9),), 9)
    Store(folder).add([Decision(problem, Policy("race"), selection, 1e-4)])


def expected(data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, w, _, bias = (tensor.double() for tensor in data)
    return F.silu(F.conv2d(x, w, bias, padding=1))


def problems() -> Iterator[ca.ConvProblem]:
    yield FUSED
    shapes = [
        ((4, 32, 20, 20), (48, 32, 3, 3), 1),
        ((8, 128, 28, 28), (128, 128, 3, 3), 1),
        ((8, 48, 28, 28), (48, 24, 3, 3), 2),
    ]
    for (x, w, groups), op in itertools.product(shapes, ("fprop", "dgrad", "wgrad")):
        yield ca.ConvProblem(
            op,
            x,
            w,
            padding=1,
            groups=groups,
            dtype=torch.float16,
            memory_format=torch.channels_last,
        )


@pytest.mark.parametrize("problem", list(problems()), ids=lambda problem: problem.text)
def test_a_plan_that_is_read_back_computes_the_same(problem: ca.ConvProblem) -> None:
    """With up to three configs of each engine."""
    data = operands(problem, torch.device("cuda"))
    output = data["xwy".index({"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op])]
    tried = 0
    by_engine = itertools.groupby(compiled(problem), lambda candidate: candidate.engine)
    for candidate in (c for _, some in by_engine for c in itertools.islice(some, 3)):
        outputs = []
        for is_read_back in (False, True):
            try:
                plan = open_search(problem).build(candidate.text)
            except ca.CudnnError:
                break
            assert plan.is_read_back is is_read_back, candidate.text
            output.fill_(float("nan"))
            _C.execute(plan, *data)
            outputs.append(output.clone())
        if len(outputs) < 2:
            continue
        tried += 1
        assert outputs[1].isfinite().all()
        if "NONDETERMINISTIC" in candidate.numerical_notes:
            assert_close(outputs[1], outputs[0].double(), ALLOWED)
        else:
            assert torch.equal(*outputs), candidate.text
    if not tried:
        pytest.skip("no engine for it is compiled at run time")


SECOND = """
import json, sys
import torch
import cudnn_autotune as ca
from cudnn_autotune.store import kept_plans
from cudnn_autotune.timers.measuring import operands, run_operator
from cudnn_autotune.tuning import prefetching
(problem,) = (known.problem for known in ca.get_store())
run_operator(problem, operands(problem, torch.device("cuda")), "race")
torch.cuda.synchronize()
(choice,) = ca.choices()
print(json.dumps([choice.text, choice.origin, kept_plans.counts()]))
"""


def test_a_second_process_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    candidate = builds(FUSED)
    place = tmp_path / "another"
    remember(place, FUSED, candidate)
    env = {"CUDNN_AUTOTUNE_CACHE": "read_write", "CUDNN_AUTOTUNE_CACHE_DIR": str(place)}
    for counts in ({"read": 0, "compiled": 1}, {"read": 1, "compiled": 0}):
        assert json.loads(evaluate(SECOND, env)) == [candidate.text, "store", counts]


def test_a_search_reads_candidates_back() -> None:
    data = operands(FUSED, torch.device("cuda"))
    run_operator(FUSED, data, "race")
    first = kept_plans.counts()
    assert first["compiled"] > 0
    store = ca.get_store()
    store.discard(list(store))
    ca.forget()
    run_operator(FUSED, data, "race")
    (choice,) = ca.choices()
    assert choice.origin == "tuned"
    second = kept_plans.counts()
    # A race may ask for some candidates that the one before did not ask for.
    assert second["read"] - first["read"] > second["compiled"] - first["compiled"]


def test_a_capture_reads_a_plan_back(folder: Path) -> None:
    candidate = builds(FUSED)
    remember(folder, FUSED, candidate)
    checked_outputs.remember(FUSED.text, candidate.text, 0, 1e-4)
    data = operands(FUSED, torch.device("cuda"))
    # PyTorch makes a thread's cuDNN handle in its first call, which may not be in a capture.
    torch.conv2d(torch.ones(1, 1, 1, 1, device="cuda"), torch.ones(1, 1, 1, 1, device="cuda"))
    before = kept_plans.counts()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = run_operator(FUSED, data, "race")
    output.fill_(float("nan"))
    graph.replay()
    assert_close(output, expected(data), ALLOWED)
    assert kept_plans.counts() == {**before, "read": before["read"] + 1}


def of_batch(number: int) -> ca.ConvProblem:
    fields = {f.name: getattr(FUSED, f.name) for f in dataclasses.fields(FUSED)}
    return ca.ConvProblem(**{**fields, "input_shape": (1 + number, 32, 20, 20)})


def test_plans_of_the_next_calls_are_read_back_meanwhile(folder: Path) -> None:
    problems = [of_batch(number) for number in range(6)]
    for problem in problems:
        remember(folder, problem, builds(problem))
    before = kept_plans.counts()
    data = operands(problems[0], torch.device("cuda"))
    assert_close(run_operator(problems[0], data, "race"), expected(data), ALLOWED)
    wait(list(prefetching._waiting.values()))
    assert kept_plans.counts() == {**before, "read": before["read"] + 6}
    for problem in problems[1:]:
        data = operands(problem, torch.device("cuda"))
        assert_close(run_operator(problem, data, "race"), expected(data), ALLOWED)
    # Nothing was read twice, and nothing is left.
    assert kept_plans.counts() == {**before, "read": before["read"] + 6}
    assert not prefetching._waiting


def test_plans_are_read_back_while_a_graph_is_captured(folder: Path) -> None:
    problems = [of_batch(number) for number in range(6)]
    for problem in problems:
        remember(folder, problem, builds(problem))
    data = [operands(problem, torch.device("cuda")) for problem in problems]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        begun = prefetching.start(
            [(d.problem, d.chosen.candidate.text) for d in ca.get_store() if d.chosen], 0
        )
        outputs = [run_operator(p, d, "race") for p, d in zip(problems, data, strict=True)]
        wait(begun)
    graph.replay()
    for output, tensors in zip(outputs, data, strict=True):
        assert_close(output, expected(tensors), ALLOWED)


def test_prefetch_makes_what_a_model_asks_for() -> None:
    layers = [ca.Conv2d(*size, 3, padding=1, sampling="race") for size in ((32, 48), (48, 32))]
    model = nn.Sequential(*layers).to("cuda", torch.float16, memory_format=torch.channels_last)
    x = torch.randn(4, 32, 20, 20, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    expected_output = model(x)
    expected_output.sum().backward()
    asked = len(ca.choices())
    winners = [choice.chosen.candidate for choice in ca.choices() if choice.chosen]
    ca.forget()
    found = ca.prefetch(model, x)
    assert found.problems == found.known == asked
    assert found.compiled == 0
    assert found.read_back == sum(winner.is_compiled for winner in winners)
    before = kept_plans.counts()
    output = model(x)
    output.sum().backward()
    assert_close(output, expected_output.double(), ALLOWED)
    assert {c.origin for c in ca.choices()} == {"store"}
    assert kept_plans.counts() == before
