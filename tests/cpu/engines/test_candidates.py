"""What cuDNN offers for five GPUs, asked of the real library through property files."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.conv.problems import OPS, PROBLEMS, RESNET_FP16, SHIPPED_GPUS, make
from support.processes.subprocesses import evaluate_forked

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import open_search

pytestmark = pytest.mark.search

MODES = ("A", "B", "FALLBACK")


@functools.cache
def offered(name: str, op: str, gpu: str) -> tuple[ca.expert.Candidate, ...]:
    """Engine configs of cuDNN; implementations have tests of their own."""
    return tuple(
        c for c in ca.expert.candidates(make(name, op), device=gpu) if c.engine is not None
    )


@pytest.fixture(params=SHIPPED_GPUS)
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.basic(30)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_are_distinct_ranked_and_described(name: str, op: str, gpu: str) -> None:
    found = offered(name, op, gpu)
    assert found
    assert len({(c.engine, tuple(sorted(c.knobs.items()))) for c in found}) == len(found)
    assert len({c.text for c in found}) == len(found)
    assert [c.rank for c in found] == list(range(len(found)))
    # The modes are asked in this order and a candidate carries the first that lists it.
    modes = [MODES.index(c.heuristic_mode) for c in found]
    assert modes == sorted(modes)
    for c in found:
        assert isinstance(c.engine, int)
        assert c.engine >= 0
        assert all(isinstance(k, str) and isinstance(v, int) for k, v in c.knobs.items())
        assert isinstance(c.workspace_bytes, int)
        assert c.workspace_bytes >= 0
        assert isinstance(c.notes, tuple)
        # cuDNN's names without their prefix: TENSOR_CORE, WINOGRAD_TILE_4x4, ...
        assert all(isinstance(n, str) and not n.startswith("CUDNN") for n in c.notes)
        assert set(c.notes) == {*c.numerical_notes, *c.behavior_notes}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_texts_round_trip(name: str, op: str, gpu: str) -> None:
    for c in offered(name, op, gpu):
        assert ca.expert.parse_engine_text(c.text) == (c.engine, c.knobs)
        assert ca.expert.engine_text(c.engine, c.knobs) == c.text


@pytest.mark.parametrize("op", OPS)
def test_heuristic_modes_overlap_and_are_merged(op: str, gpu: str) -> None:
    """Modes A and B list mostly the same configs; each of A's comes once, none of B's again."""
    by_mode = {mode: 0 for mode in MODES}
    for c in offered("resnet_fp16_nhwc", op, gpu):
        by_mode[c.heuristic_mode] += 1
    assert by_mode["A"] > by_mode["B"]
    assert by_mode["FALLBACK"] > 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gpu_name", ["h200", "l4"])
def test_plans_rebuild_from_their_text(op: str, gpu_name: str) -> None:
    """create_execution_plan(engine, knobs) gives back what the heuristic listed."""
    problem = make("resnet_fp16_nhwc", op)
    found = offered("resnet_fp16_nhwc", op, gpu_name)
    built = 0
    for c in found:
        try:
            plan = ca.expert.build_plan(problem, c.text, device=gpu_name)
        except ca.CudnnError:
            continue
        built += 1
        assert plan.text == c.text
        assert plan.workspace_bytes == c.workspace_bytes
    assert built >= 0.9 * len(found), f"{built} of {len(found)} build"


@pytest.mark.basic(30)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_first_choice_builds_everywhere(name: str, op: str, gpu: str) -> None:
    first = offered(name, op, gpu)[0]
    plan = ca.expert.build_plan(make(name, op), first.text, device=gpu)
    assert (plan.text, plan.workspace_bytes) == (first.text, first.workspace_bytes)


@pytest.mark.parametrize("op", OPS)
def test_gpus_differ(op: str) -> None:
    hopper = [c.text for c in offered("resnet_fp16_nhwc", op, "h200")]
    ada = [c.text for c in offered("resnet_fp16_nhwc", op, "l4")]
    assert set(hopper) != set(ada)


def test_a_large_dilation_of_one_element() -> None:
    """cuDNN 9.19 divides by zero there, which would end this process."""
    shapes = {"input_shape": (8, 16, 32), "weight_shape": (16, 16, 1), "stride": 3, "padding": 2}
    problem = ca.ConvProblem("dgrad", **shapes, dilation=2**31 - 1, dtype=torch.float16)
    assert ca.expert.candidates(problem, device="h200")


def test_several_threads_may_use_a_search() -> None:
    """As while candidates are built in the background."""
    problem = make("resnet_fp16_nhwc", bias=True)
    listed_here = ca.expert.candidates(problem, device="h200")
    texts = [c.text for c in listed_here if not c.id.is_implementation]
    search = open_search(problem, "h200")
    with ThreadPoolExecutor(6) as threads:
        building = threads.submit(search.build_many, texts, 2)
        asking = [threads.submit(search.query, mode) for mode in ("A", "B", "FALLBACK")]
        described = [c.text for c in threads.map(search.describe, texts)]
    assert described == texts
    assert [error for _, error in building.result()] == [""] * len(texts)
    listed = [c.text for mode in asking for c in mode.result()]
    assert len(set(listed)) == len(listed), "each is listed once"


def test_a_text_of_another_gpu_does_not_build_silently() -> None:
    """Hopper's own engines are unknown to a T4: an error that names call, status and problem."""
    problem = ca.ConvProblem(op="fprop", **RESNET_FP16)
    only_hopper = [
        c.text for c in offered("resnet_fp16_nhwc", "fprop", "h200") if "TILE_CGA_M" in c.knobs
    ]
    assert only_hopper
    with pytest.raises(ca.CudnnError) as error:
        ca.expert.build_plan(problem, only_hopper[0], device="t4")
    message = str(error.value)
    assert "cudnn" in message.lower()
    assert "STATUS" in message.upper()
    assert problem.text in message
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_other_dtypes_have_candidates(op: str, dtype: torch.dtype) -> None:
    assert ca.expert.candidates(make("resnet_fp16_nhwc", op, dtype=dtype), device="h200")


FEW_THREADS = """
import resource
from pathlib import Path
import torch
import cudnn_autotune as ca

problem = ca.ConvProblem("fprop", (8, 64, 28, 28), (64, 64, 3, 3), padding=1, dtype=torch.float16,
                         memory_format=torch.channels_last)
properties = (Path(ca.__file__).parent / "engines" / "devices" / "h200.json").read_text()
search = ca._C.EngineList.by_properties(problem.native(), properties)
texts = [candidate.text for candidate in search.query("A")]
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
built = search.build_many(texts, 8)
print(len(texts), len(built))
"""


@pytest.mark.slow
def test_where_threads_cannot_be_had_fewer_build() -> None:
    """A container's limit of processes, or of memory for their stacks."""
    wanted, built = evaluate_forked(FEW_THREADS).split()
    assert int(wanted) == int(built) > 8
