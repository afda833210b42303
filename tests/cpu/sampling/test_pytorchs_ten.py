"""Never slower than PyTorch's benchmark mode with its limit of ten, by construction: what it times
is raced by ``auto``, where nothing was recorded that proves it slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.simulation import GPU, SimulatedEngine, SimulatedTimer
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_autotune as ca
from cudnn_autotune.audit.offline.stand_ins import StaticCandidates
from cudnn_autotune.engines.candidates import QueriedCandidates, named
from cudnn_autotune.engines.configs import OWN_PATH, Candidate, open_search
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.unlisted import has_faster_kernels, timed_by_pytorch
from cudnn_autotune.sampling.auto import AUTO, Shortlist
from cudnn_autotune.sampling.strategy import Limits

COMPILED = ("RUNTIME_COMPILATION",)
SOLID: dict[str, Any] = {
    "input_shape": (1, 64, 4, 20, 24),
    "weight_shape": (64, 64, 3, 3, 3),
    "padding": 1,
    "memory_format": torch.channels_last_3d,
}
FLAT: dict[str, Any] = {"input_shape": (8, 64, 300), "weight_shape": (64, 64, 5), "padding": 2}
GROUPED: dict[str, Any] = {
    "input_shape": (4, 64, 20, 24),
    "weight_shape": (64, 16, 3, 3),
    "padding": 1,
    "groups": 4,
}
GROUPED_LAST: dict[str, Any] = {**GROUPED, "memory_format": torch.channels_last}
KINDS = {"3-d": SOLID, "1-d": FLAT, "grouped": GROUPED, "grouped, channels_last": GROUPED_LAST}
MEASURED: dict[str, Any] = {
    "input_shape": (4, 64, 20, 24),
    "weight_shape": (64, 64, 3, 3),
    "padding": 1,
    "memory_format": torch.channels_last,
}


def of_engine(text: str, rank: int, mode: str, is_compiled: bool = False) -> Candidate:
    notes = COMPILED if is_compiled else ()
    return Candidate(100 + rank, {}, 0, (), notes, text, mode, rank)


def problem_of(fields: dict[str, Any], op: str = "fprop") -> ca.ConvProblem:
    return ca.ConvProblem(op, dtype=torch.bfloat16, **fields)


def listed(of_a: int, of_fallback: int) -> list[Candidate]:
    """The second candidate of each mode is compiled at run time."""
    return [
        *(of_engine(f"a{i}", i, "A", is_compiled=i == 1) for i in range(of_a)),
        *(of_engine(f"b{i}", 50 + i, "B") for i in range(3)),
        *(of_engine(f"f{i}", 60 + i, "FALLBACK", is_compiled=i == 1) for i in range(of_fallback)),
    ]


def texts(candidates: Sequence[Candidate]) -> list[str]:
    return [c.text for c in candidates]


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_mode_fallback_follows_mode_a(fields: dict[str, Any]) -> None:
    problem = problem_of(fields)
    assert texts(timed_by_pytorch(problem, listed(3, 4))) == [
        *("a0", "a1", "a2"),
        *("f0", "f1", "f2", "f3"),
    ]
    assert texts(timed_by_pytorch(problem, listed(8, 4)))[8:] == ["f0", "f1"]
    assert texts(timed_by_pytorch(problem, listed(12, 4))) == [f"a{i}" for i in range(10)]


def test_what_was_measured_to_be_slow_is_left_out() -> None:
    assert texts(timed_by_pytorch(problem_of(MEASURED), listed(3, 4))) == ["a0", "a1", "a2"]
    assert texts(timed_by_pytorch(None, listed(3, 4))) == ["a0", "a1", "a2"]


def test_pytorch_has_no_plan_that_adds_a_bias() -> None:
    both = []
    for i, candidate in enumerate(listed(3, 2)):
        engine = candidate.engine
        assert engine is not None
        both.append(dataclasses.replace(candidate, text=f"unfused:eng{engine}", rank=2 * i))
        both.append(dataclasses.replace(candidate, text=f"eng{engine}", rank=2 * i + 1))
    found = timed_by_pytorch(problem_of({**SOLID, "bias": True}), both)
    assert len(found) == 5
    assert all(c.is_unfused for c in found)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("text", ["a1", "f0", "f1", "f3"])
@pytest.mark.parametrize("mode", ["auto", "race"])
def test_the_fastest_of_them_is_chosen(mode: str, text: str, fields: dict[str, Any]) -> None:
    """Also where it is of mode FALLBACK, compiled at run time or not."""
    engines = [
        SimulatedEngine(c, 0.7 if c.text == text else 1.0, 100.0) for c in [*listed(3, 4), OWN_PATH]
    ]
    timer = SimulatedTimer(GPU, engines)
    timer.candidates.problem = problem_of(fields)
    strategy: Any = replace(AUTO, seed=0) if mode == "auto" else ca.sampling.get(mode)
    assert strategy.select(timer.candidates, timer, Limits()).winner.candidate.text == text


@pytest.mark.search
@pytest.mark.parametrize(
    ("changes", "is_a_plan"),
    [
        ({}, True),
        ({"bias": True}, True),
        ({"activation": "relu"}, False),
        ({"padding": (1, 0, 1, 1)}, False),
        ({"padding": "same", "weight_shape": (64, 64, 4, 3)}, False),
    ],
)
def test_its_own_path_is_timed_unless_it_is_one_of_cudnns_plans(
    changes: dict[str, Any], is_a_plan: bool
) -> None:
    """It pads the input by a kernel of its own where the padding differs before and after."""
    problem = ca.ConvProblem("fprop", **{**MEASURED, "dtype": torch.float16, **changes})
    search = open_search(problem, "h200")
    with FakeTensorMode():
        shapes = (problem.input_shape, problem.weight_shape)
        on_gpu = tuple(torch.empty(s, dtype=problem.dtype, device="cuda") for s in shapes)
        found = QueriedCandidates(search, problem, on_gpu, gpu=gpu_of("h200"))
        assert found.aten_uses_cudnn == is_a_plan


@pytest.mark.search
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_the_short_list_has_all_that_cudnn_lists_there(op: str) -> None:
    """By cuDNN's own heuristics, for layers of which mode A lists fewer than ten as well."""
    reached = 0
    shapes = [(4, 64), (32, 64), (64, 96), (256, 32)]
    for dtype in (torch.float16, torch.float32):
        for channels, filters in shapes:
            for groups in (1, 2, 4):
                for spatial in ((57,), (9, 13), (3, 8, 9)):
                    problem = ca.ConvProblem(
                        op,
                        (2, channels, *spatial),
                        (filters, channels // groups, *[3] * len(spatial)),
                        padding=1,
                        groups=groups,
                        dtype=dtype,
                    )
                    found = QueriedCandidates(open_search(problem, "h100"), problem, ())
                    found_short = Shortlist(_WithCudnn(found))
                    of_pytorch = [*found.of_mode("A"), *found.of_mode("FALLBACK")][:10]
                    short = {c.text for c in [*found_short.all(), *found_short.beyond()]}
                    assert {c.text for c in of_pytorch} <= short, problem.text
                    reached += any(c.heuristic_mode == "FALLBACK" for c in of_pytorch)
    assert reached > 0, "PyTorch goes on to mode FALLBACK for none of these"


class _WithCudnn(StaticCandidates):
    """What a search sees, without operands on a GPU."""

    def __init__(self, found: QueriedCandidates) -> None:
        listed = [*found.of_mode("A"), *found.of_mode("FALLBACK"), *found.beyond()]
        super().__init__(listed, problem=found.problem)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu(0.1)"])
def test_with_an_activation_few_are_compiled(activation: str) -> None:
    """PyTorch has no plan with one."""
    engines = [4] * 6 + [7] * 3 + [2]
    compiled = [
        Candidate(engine, {"KERNEL_CFG": i}, 0, (), COMPILED, f"eng{engine}:KERNEL_CFG={i}", "A", i)
        for i, engine in enumerate(engines)
    ]
    problem = problem_of({**MEASURED, "bias": True, "activation": activation})
    candidates = StaticCandidates(compiled, problem=problem)
    assert [c.rank for c in Shortlist(candidates).all()] == [0, 1, 2, 3]


DEPTHWISE: dict[str, Any] = {**MEASURED, "weight_shape": (64, 1, 3, 3), "groups": 64}
SIGNALS: dict[str, Any] = {**MEASURED, "padding": (0, 1)}


@pytest.mark.parametrize(
    ("implementation", "fields", "is_faster"),
    [
        ("depthwise", {**DEPTHWISE, "input_shape": (8, 64, 56, 56)}, True),
        ("implicit_gemm_1d", {**SIGNALS, "weight_shape": (64, 64, 1, 3)}, True),
        ("implicit_gemm_1d", {**SIGNALS, "weight_shape": (128, 64, 1, 3)}, False),
        ("implicit_gemm_1d", {**SIGNALS, "weight_shape": (64, 64, 1, 2)}, False),
    ],
)
@pytest.mark.parametrize("activation", ["", "relu", "leaky_relu(0.1)"])
def test_beside_a_faster_kernel_nothing_of_cudnn_is_compiled(
    implementation: str, fields: dict[str, Any], is_faster: bool, activation: str
) -> None:
    """Where engines for an activation are all compiled, too."""
    ours = named(f"{implementation}@1:ROWS=4", 20_000)
    ours = dataclasses.replace(ours, behavior_notes=COMPILED)
    compiled = [of_engine(f"eng{n}:KERNEL_CFG=0", n, "A", is_compiled=True) for n in range(4, 8)]
    compiled.append(of_engine("eng8:KERNEL_CFG=0", 9, "FALLBACK", is_compiled=True))
    problem = problem_of({**fields, "bias": bool(activation), "activation": activation})
    short = Shortlist(StaticCandidates([*compiled, ours, OWN_PATH], problem=problem))
    left = texts([*short.all(), *short.beyond()])
    assert {ours.text, "aten"} <= set(left)
    if not activation and fields["memory_format"] == torch.channels_last:
        left = [text for text in left if text != "eng4:KERNEL_CFG=0"]  # what PyTorch would run
    assert any(text.startswith("eng") for text in left) != is_faster


@pytest.mark.parametrize(
    ("implementations", "is_faster"),
    [(["implicit_gemm_1d"], False), (["implicit_gemm_1d", "grouped"], True)],
)
def test_a_kernel_of_groups_counts_beside_one_of_signals(
    implementations: list[str], is_faster: bool
) -> None:
    problem = problem_of({**SIGNALS, "weight_shape": (64, 16, 1, 3), "groups": 4})
    ours = [named(f"{name}@1:ROWS=4", 20_000) for name in implementations]
    assert has_faster_kernels(problem, ours) == is_faster
