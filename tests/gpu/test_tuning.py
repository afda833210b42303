"""What is chosen, when it is chosen again, and what is remembered about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.references import assert_close
from torch import Tensor

import cudnn_autotune as ca

TIMED = ("sample_once", "median_of_three", "till_stable")


def only_choice(**fields: Any) -> ca.Choice:
    """The one entry of the table whose fields, or whose problem's fields, are these."""
    found = [
        c
        for c in ca.choices()
        if all(
            getattr(c if hasattr(c, name) else c.problem, name) == value
            for name, value in fields.items()
        )
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("mode", ["heuristic", *TIMED])
def test_every_mode_makes_a_documented_choice(mode: str, operands: tuple[Tensor, Tensor]) -> None:
    input, weight = operands
    ca.functional.conv2d(input, weight, padding=1, sampling=mode)
    choice = only_choice(sampling=mode)
    problem = choice.problem
    assert (problem.op, problem.input_shape, problem.weight_shape, problem.padding) == (
        "fprop",
        tuple(input.shape),
        tuple(weight.shape),
        (1, 1, 1, 1),
    )
    assert (problem.dtype, problem.memory_format) == (torch.float16, torch.contiguous_format)
    assert choice.device == torch.cuda.current_device()
    offered = {c.text: c for c in ca.expert.candidates(problem, device="cuda")}
    assert choice.engine is not None, "ATen is a fallback here, not a candidate"
    assert ca.expert.parse_engine_text(choice.text) == (choice.engine, choice.knobs)
    assert choice.workspace_bytes == offered[choice.text].workspace_bytes
    assert choice.workspace_limit is None
    assert choice.chosen == choice.selection.winner
    assert choice.selection.evidence.tied == (choice.text,)
    assert 0 < choice.selection.evidence.wall_ms <= choice.tuning_ms
    stored = json.loads(json.dumps(choice.selection.to_json(), allow_nan=False))
    assert ca.Selection.from_json(stored) == choice.selection
    if mode == "heuristic":
        assert choice.time_ms is None
        assert (choice.samples, choice.total_samples, choice.candidates) == (0, 0, 0)
        return
    assert 0 < choice.time_ms < 1000
    assert 1 <= choice.samples <= choice.total_samples
    if mode == "sample_once":
        assert choice.samples == 1
    if mode == "median_of_three":
        assert choice.samples == 3
    assert choice.ranking[0] == (choice.text, choice.time_ms)
    times = [time for _, time in choice.ranking]
    assert times == sorted(times)
    assert {text for text, _ in choice.ranking} <= offered.keys()
    # cuDNN's own search drops plans whose times are equal.
    assert 3 <= choice.candidates <= len(offered)
    assert choice.relative_error < 2e-3
    assert not choice.rejected


def test_heuristic_takes_the_first_that_builds(operands: tuple[Tensor, Tensor]) -> None:
    ca.functional.conv2d(*operands, sampling="heuristic")
    choice = only_choice()
    for candidate in ca.expert.candidates(choice.problem, device="cuda"):
        try:
            ca.expert.build_plan(choice.problem, candidate.text, device="cuda")
        except ca.CudnnError:
            continue
        assert choice.text == candidate.text
        return
    pytest.fail("no candidate builds")


@pytest.mark.parametrize("mode", TIMED)
@pytest.mark.parametrize("limit", [1, 3])
def test_benchmark_limit(mode: str, limit: int, operands: tuple[Tensor, Tensor]) -> None:
    with ca.flags(mode, benchmark_limit=limit):
        ca.functional.conv2d(*operands)
    choice = only_choice()
    assert 1 <= choice.candidates <= limit
    assert len(choice.ranking) == choice.candidates
    ca.functional.conv2d(*operands, sampling=mode)  # another limit is another question
    assert max(c.candidates for c in ca.choices()) > limit


@pytest.mark.parametrize("mode", ["heuristic", "sample_once"])
def test_workspace_limit(mode: str, operands: tuple[Tensor, Tensor]) -> None:
    ca.functional.conv2d(*operands, sampling=mode, workspace_limit=0)
    choice = only_choice(workspace_limit=0)
    assert choice.workspace_bytes == 0
    offered = {
        c.text: c.workspace_bytes for c in ca.expert.candidates(choice.problem, device="cuda")
    }
    assert all(offered[text] == 0 for text, _ in choice.ranking)
    assert any(offered.values()), "no candidate wants workspace: the limit is not tested"
    ca.functional.conv2d(*operands, sampling=mode)
    assert len(ca.choices()) == 2


def test_backward_follows_the_forwards_policy(operands: tuple[Tensor, Tensor]) -> None:
    """It runs on autograd's own thread, and perhaps after the context has been left."""
    input, weight = (t.requires_grad_() for t in operands)
    with ca.flags("sample_once", workspace_limit=1 << 20):
        output = ca.functional.conv2d(input, weight)
    output.sum().backward()
    assert {(c.problem.op, c.sampling, c.workspace_limit) for c in ca.choices()} == {
        (op, "sample_once", 1 << 20) for op in ("fprop", "dgrad", "wgrad")
    }


def test_the_global_flags_are_part_of_the_question(cudnn_flags: Callable[..., None]) -> None:
    input = torch.randn(2, 16, 12, 12, device="cuda")
    weight = torch.randn(16, 16, 3, 3, device="cuda")
    cudnn_flags(allow_tf32=True)
    ca.functional.conv2d(input, weight, sampling="heuristic")
    assert only_choice().problem.allow_tf32
    cudnn_flags(allow_tf32=False)
    ca.functional.conv2d(input, weight, sampling="heuristic")
    full = only_choice(allow_tf32=False)
    notes = {c.text: c.notes for c in ca.expert.candidates(full.problem, device="cuda")}
    assert "TENSOR_CORE" not in notes[full.text]
    cudnn_flags(deterministic=True)
    ca.functional.conv2d(input, weight, sampling="heuristic")
    only_choice(deterministic=True)
    cudnn_flags(deterministic=False)
    torch.use_deterministic_algorithms(True)
    ca.functional.conv2d(input, weight, sampling="heuristic")
    assert len(ca.choices()) == 3, "the two ways of asking for determinism are one question"


@pytest.mark.parametrize("change", ["batch", "size", "stride", "dilation", "groups", "layout"])
def test_another_problem_is_another_entry(change: str, operands: tuple[Tensor, Tensor]) -> None:
    input, weight = operands
    ca.functional.conv2d(input, weight, sampling="heuristic")
    keywords: dict[str, Any] = {}
    if change == "batch":
        input = input[:2]
    elif change == "size":
        input = input[..., :-1].contiguous()
    elif change == "layout":
        input = input.to(memory_format=torch.channels_last)
    elif change == "groups":
        weight, keywords = weight[:, :8].contiguous(), {"groups": 2}
    else:
        keywords = {change: 2}
    ca.functional.conv2d(input, weight, sampling="heuristic", **keywords)
    assert len({c.problem for c in ca.choices()}) == 2


def test_values_are_no_part_of_the_problem_and_a_bias_is(operands: tuple[Tensor, Tensor]) -> None:
    input, weight = operands
    ca.functional.conv2d(input, weight, sampling="heuristic")
    ca.functional.conv2d(2 * input, weight, sampling="heuristic")
    assert not only_choice().problem.bias
    for factor in (1, 2):
        bias = factor * torch.ones(24, device="cuda", dtype=torch.float16)
        ca.functional.conv2d(input, weight, bias, sampling="heuristic")
    assert [choice.problem.bias for choice in ca.choices()] == [False, True]


def test_fallbacks_are_counted_with_their_reason(
    operands: tuple[Tensor, Tensor], cudnn_flags: Callable[..., None]
) -> None:
    expected = torch.nn.functional.conv2d(*operands)
    assert ca.fallbacks() == {}
    cudnn_flags(enabled=False)
    for _ in range(3):
        output = ca.functional.conv2d(*operands)
    cudnn_flags(enabled=True)
    assert_close(output, expected, 4e-3)
    ((reason, count),) = ca.fallbacks().items()
    assert "enabled" in reason
    assert count == 3
    assert ca.choices() == []
    ca.functional.conv2d(operands[0][:0], operands[1])
    assert len(ca.fallbacks()) == 2
    ca.functional.conv2d(*operands, sampling="heuristic")
    assert len(ca.fallbacks()) == 2, "cuDNN served this one"
    ca.forget()
    assert ca.fallbacks() == {}
