"""Not only the winner: every candidate that builds computes the right thing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from support.conv.references import OPERANDS, random_operands, reference, relative_error, tolerance
from support.kernels.random_problems import KINDS, random_problem
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import GuardedMemory
from cudnn_autotune.engines.configs import build_plan
from cudnn_autotune.timers.measuring import WRITTEN, operands
from cudnn_autotune.tuning import checking

NHWC = torch.channels_last

PROBLEMS: dict[str, dict[str, Any]] = {
    "fp16_nhwc": {
        "input_shape": (4, 64, 28, 28), "weight_shape": (64, 64, 3, 3), "padding": 1,
        "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp16_nchw": {
        "input_shape": (4, 32, 20, 20), "weight_shape": (48, 32, 3, 3), "padding": 1,
        "dtype": torch.float16,
    },
    "bf16_stride_asymmetric": {
        "input_shape": (4, 32, 21, 20), "weight_shape": (32, 32, 3, 3), "stride": 2,
        "padding": (0, 0, 1, 1), "dtype": torch.bfloat16, "memory_format": NHWC,
    },
    "fp16_groups": {
        "input_shape": (4, 64, 14, 14), "weight_shape": (64, 16, 3, 3), "padding": 1,
        "groups": 4, "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp16_dilated_odd": {
        "input_shape": (3, 5, 17, 19), "weight_shape": (7, 5, 3, 2), "dilation": (2, 3),
        "padding": (2, 1), "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp16_pointwise": {
        "input_shape": (4, 64, 14, 14), "weight_shape": (128, 64, 1, 1),
        "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp32_nchw": {
        "input_shape": (4, 16, 20, 20), "weight_shape": (32, 16, 3, 3), "padding": 1,
        "dtype": torch.float32, "allow_tf32": False,
    },
    "fp32_nchw_5x5": {
        "input_shape": (2, 8, 24, 24), "weight_shape": (16, 8, 5, 5), "padding": 2,
        "dtype": torch.float32, "allow_tf32": False,
    },
    "tf32_nhwc": {
        "input_shape": (4, 32, 16, 16), "weight_shape": (32, 32, 3, 3), "padding": 1,
        "dtype": torch.float32, "memory_format": NHWC,
    },
    "tf32_nchw_asymmetric": {
        "input_shape": (2, 16, 15, 12), "weight_shape": (16, 16, 4, 2), "padding": (1, 0, 2, 1),
        "dtype": torch.float32,
    },
    "tf32_nchw_one_dimension_asymmetric": {
        "input_shape": (2, 8, 31), "weight_shape": (8, 1, 7), "padding": (3, 5), "groups": 8,
        "dtype": torch.float32,
    },
    "tf32_nchw_odd": {
        "input_shape": (3, 32, 53, 43), "weight_shape": (8, 32, 1, 3), "dtype": torch.float32,
    },
    "fp16_odd_groups_of_four": {
        "input_shape": (4, 12, 45, 39), "weight_shape": (12, 4, 3, 1), "stride": 2, "groups": 3,
        "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp16_depthwise_hardly_aligned": {
        "input_shape": (3, 72, 33, 13), "weight_shape": (72, 1, 5, 5), "padding": 2, "groups": 72,
        "dtype": torch.float16, "memory_format": NHWC, "alignment": (8, 8, 4),
    },
    "fp16_kernel_larger_than_its_image": {
        "input_shape": (1, 28, 1, 47), "weight_shape": (28, 4, 3, 3), "padding": (0, 2, 3, 2),
        "groups": 7, "dtype": torch.float16, "memory_format": NHWC,
    },
    "fp64_nchw": {
        "input_shape": (2, 8, 12, 12), "weight_shape": (8, 8, 3, 3), "padding": 1,
        "dtype": torch.float64,
    },
    "fp16_one_dimension": {
        "input_shape": (4, 32, 100), "weight_shape": (32, 32, 5), "padding": 2,
        "dtype": torch.float16,
    },
    "fp16_three_dimensions": {
        "input_shape": (2, 16, 8, 10, 10), "weight_shape": (16, 16, 3, 3, 3), "padding": 1,
        "dtype": torch.float16, "memory_format": torch.channels_last_3d,
    },
}  # fmt: skip

OPS = ("fprop", "dgrad", "wgrad")
# To compile an engine takes up to a second.
_MOST_COMPILED = 3
# Some ask for 40 GiB, and other tests run beside this one.
_MOST_WORKSPACE_BYTES = 2**30


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_candidate_is_right(name: str, op: str) -> None:
    problem = ca.ConvProblem(op=op, **PROBLEMS[name])
    a, b = random_operands(problem, "cuda")
    expected = reference(problem, a, b)
    allowed = tolerance(problem.dtype, problem.allow_tf32)
    candidates = ca.expert.candidates(problem, device="cuda")
    assert candidates
    wrong, refused = [], []
    for candidate in candidates:
        try:
            # The output buffer holds NaN before the launch: what is not written shows.
            output = ca.expert.execute(problem, candidate.text, a, b)
        except ca.CudnnError as error:
            refused.append(f"{candidate.text}: {error}")
            continue
        assert output.is_contiguous(memory_format=problem.memory_format)
        error = relative_error(output, expected)
        if not error <= allowed:
            wrong.append(f"{candidate.text} {candidate.notes}: relative error {error:.3g}")
    assert not wrong, "\n".join([problem.text, *wrong])
    assert len(refused) <= 0.1 * len(candidates), "\n".join([problem.text, *refused])


def faults(problem: ca.ConvProblem) -> list[str]:
    """What the engines do wrong, each on its own between guard bands: beside the result and the
    workspace may lie other tensors of the caller's."""
    data = list(operands(problem, "cuda"))
    place = WRITTEN[problem.op]
    expected = reference(problem, *(data["xwy".index(name)] for name in OPERANDS[problem.op]))
    found = []
    compiled = 0
    for candidate in ca.expert.candidates(problem, device="cuda"):
        compiled += candidate.is_compiled
        if candidate.engine is None or (candidate.is_compiled and compiled > _MOST_COMPILED):
            continue
        result = GuardedMemory.like(data[place])
        data[place] = result.as_tensor(data[place])
        try:
            plan = build_plan(problem, candidate.text)
            if plan.workspace_bytes > _MOST_WORKSPACE_BYTES:
                continue
            workspace = GuardedMemory(plan.workspace_bytes, data[place].device)
            result.memory.fill_(0xFF)  # NaN
            _C.execute(plan, *data, workspace=workspace.memory)
            torch.cuda.synchronize()
        except ca.CudnnError:
            continue
        error = relative_error(data[place], expected)
        if not error <= checking.tolerance(problem):
            found.append(f"{candidate.text} {candidate.notes}: relative error {error:.3g}")
        for where, memory in (("result", result), ("workspace", workspace)):
            if memory.is_touched():
                found.append(f"{candidate.text} {candidate.notes}: writes beside its {where}")
    return [f"{problem.text}: {fault}" for fault in found]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_candidate_writes_outside_of_its_result_and_its_workspace(name: str, op: str) -> None:
    assert not faults(ca.ConvProblem(op=op, **PROBLEMS[name]))


@pytest.mark.parametrize("seed", range(32))
def test_no_engine_is_wrong_for_random_problems(seed: int) -> None:
    rng = random.Random(seed)
    drawn = (random_problem(rng, rng.choice(list(KINDS))) for _ in range(24))
    problems = [problem for problem in drawn if not problem.is_fused]
    assert not [fault for problem in problems for fault in faults(problem)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["fp16_nhwc", "fp32_nchw"])
def test_deterministic_candidates_repeat_to_the_bit(name: str, op: str) -> None:
    problem = ca.ConvProblem(op=op, **{**PROBLEMS[name], "deterministic": True})
    a, b = random_operands(problem, "cuda")
    for candidate in ca.expert.candidates(problem, device="cuda"):
        try:
            first, *others = (ca.expert.execute(problem, candidate.text, a, b) for _ in range(4))
        except ca.CudnnError:
            continue
        assert all(torch.equal(first, other) for other in others), candidate.text


WRONG_OPERANDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "shape": lambda a, b: (a[:2], b),
    "order": lambda a, b: (b, a),
    "dtype": lambda a, b: (a.float(), b),
    "device": lambda a, b: (a.cpu(), b),
}


@pytest.mark.parametrize("what", WRONG_OPERANDS)
def test_operands_that_do_not_fit_are_refused(what: str) -> None:
    problem = ca.ConvProblem(op="fprop", **PROBLEMS["fp16_nhwc"])
    text = ca.expert.candidates(problem, device="cuda")[0].text
    a, b = random_operands(problem, "cuda")
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        ca.expert.execute(problem, text, *WRONG_OPERANDS[what](a, b))
    error = relative_error(ca.expert.execute(problem, text, a, b), reference(problem, a, b))
    assert error <= tolerance(problem.dtype)


def test_operands_may_have_any_layout() -> None:
    problem = ca.ConvProblem(op="fprop", **PROBLEMS["fp16_nhwc"])
    text = ca.expert.candidates(problem, device="cuda")[0].text
    a, b = random_operands(problem, "cuda")
    expected = ca.expert.execute(problem, text, a, b)
    assert torch.equal(ca.expert.execute(problem, text, a.contiguous(), b.contiguous()), expected)


@pytest.mark.parametrize("cache", ["hot", "cold"])
def test_measure_times_what_execute_runs(cache: Literal["hot", "cold"]) -> None:
    problem = ca.ConvProblem(op="fprop", **PROBLEMS["fp16_nhwc"])
    texts = [c.text for c in ca.expert.candidates(problem, device="cuda")[:3]]
    times = ca.expert.measure(problem, texts, rounds=4, target_ms=0.2, cache=cache)
    assert set(times) == set(texts)
    for samples in times.values():
        assert len(samples) == 4
        assert all(0 < t < 1000 for t in samples)
