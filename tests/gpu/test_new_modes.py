"""``race``, ``sustained`` and ``auto`` through the functions that users call."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.conv.references import assert_close
from support.tuning.strategies import ONLY_MATMUL
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.unlisted import MATMUL

MODES = ("race", "sustained", "auto")
NHWC = torch.channels_last
OPS = {"fprop", "dgrad", "wgrad"}

# input shape, weight shape, dtype, layout, keywords of conv2d
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Any, dict[str, Any]]] = {
    "dense": ((16, 64, 28, 28), (64, 64, 3, 3), torch.float16, NHWC, {"padding": 1}),
    "contiguous_fp32": (
        (4, 16, 20, 20), (24, 16, 3, 3), torch.float32, torch.contiguous_format, {"stride": 2},
    ),
    "depthwise": (
        (8, 32, 28, 28), (32, 1, 3, 3), torch.float32, torch.contiguous_format,
        {"padding": 1, "groups": 32},
    ),
    # 30 channels: most engines have to copy the input.
    "ragged": ((8, 30, 28, 28), (40, 30, 3, 3), torch.float16, NHWC, {"padding": 1}),
    "pointwise": ((8, 64, 14, 14), (96, 64, 1, 1), torch.float16, NHWC, {}),
    "pointwise_bf16": ((8, 64, 14, 14), (96, 64, 1, 1), torch.bfloat16, NHWC, {}),
}  # fmt: skip
ALLOWED = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def full_precision(cudnn_flags: Callable[..., None]) -> None:
    cudnn_flags(allow_tf32=False)


def operands(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    input_shape, weight_shape, dtype, layout, _ = LAYERS[name]
    generator = torch.Generator().manual_seed(seed)
    input, weight = (
        torch.randn(shape, generator=generator).to("cuda", dtype).contiguous(memory_format=layout)
        for shape in (input_shape, weight_shape)
    )
    return input, weight


def expected(name: str, input: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(
        input.cpu().double(), weight.cpu().double(), **LAYERS[name][4]
    )


def training_step(function: Callable[..., Tensor], name: str, **policy: Any) -> list[Tensor]:
    """Output and both gradients; on the CPU in float64 where ``function`` is PyTorch's."""
    input, weight = operands(name)
    if function is torch.nn.functional.conv2d:
        input, weight = input.cpu().double(), weight.cpu().double()
    input.requires_grad_()
    weight.requires_grad_()
    output = function(input, weight, **LAYERS[name][4], **policy)
    generator = torch.Generator().manual_seed(1)
    seed = torch.randn(output.shape, generator=generator).to(LAYERS[name][2]).to(output)
    seed = seed.contiguous(memory_format=LAYERS[name][3])
    return [output, *torch.autograd.grad(output, (input, weight), seed)]


def check_step(name: str, **policy: Any) -> None:
    right = training_step(torch.nn.functional.conv2d, name)
    mine = training_step(ca.functional.conv2d, name, **policy)
    for what, actual, wanted in zip(("output", "dgrad", "wgrad"), mine, right, strict=True):
        assert_close(actual, wanted, ALLOWED[LAYERS[name][2]], f"{what} of {name}")


def texts(choice: ca.Choice) -> list[str]:
    return [entry.candidate.text for entry in choice.selection.ranking]


def check_evidence(choice: ca.Choice) -> None:
    selection, evidence = choice.selection, choice.selection.evidence
    assert max(Counter(texts(choice)).values()) == 1, "a candidate is there twice"
    assert OWN_PATH.text in texts(choice)
    assert choice.text == choice.chosen.candidate.text
    if not choice.rejected:
        assert choice.chosen == selection.winner
        assert choice.text in evidence.tied
    assert 0 < choice.time_ms < 1000
    assert 1 <= choice.samples <= selection.total_samples
    assert evidence.rule
    assert evidence.confidence == pytest.approx(0.95)
    assert 0 <= evidence.regret_bound < math.inf
    assert evidence.gpu_ms > 0
    assert 0 < evidence.wall_ms <= choice.tuning_ms
    for entry in selection.ranking:
        if entry.low_ms is not None and entry.high_ms is not None and entry.time_ms is not None:
            assert 0 < entry.low_ms <= entry.time_ms <= entry.high_ms
        if entry.sustained_ms is not None:
            assert 0 < entry.sustained_ms < 1000
    offered = {c.text for c in ca.expert.candidates(choice.problem, device="cuda")}
    assert {e.candidate.text for e in selection.ranking if e.candidate.heuristic_mode} <= offered
    stored = json.loads(json.dumps(selection.to_json(), allow_nan=False))
    assert ca.Selection.from_json(stored) == selection
    assert choice.relative_error < ALLOWED[choice.problem.dtype]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_right_results_with_their_evidence(mode: str, name: str) -> None:
    check_step(name, sampling=mode)
    made = ca.choices()
    assert {c.problem.op for c in made} == OPS
    for choice in made:
        assert choice.sampling == mode
        check_evidence(choice)
    check_step(name, sampling=mode)
    assert ca.choices() == made, "what is known was tuned again"


@pytest.mark.parametrize("mode", [*MODES, "sample_once", "till_stable"])
def test_pytorchs_depthwise_kernels_are_met(mode: str) -> None:
    """cuDNN's engines are up to ten times slower here: never slower than PyTorch."""
    check_step("depthwise", sampling=mode)
    for choice in ca.choices():
        aten = {e.candidate.text: e for e in choice.selection.ranking}[OWN_PATH.text]
        assert aten.time_ms is not None
        assert choice.time_ms is not None
        if mode in MODES:  # the others time the two of them under different conditions
            assert choice.time_ms <= 1.1 * aten.time_ms, choice.problem.op


@pytest.mark.skipif(
    not hasattr(torch._C, "_get_cudnn_depthwise_kernel"),
    reason="this torch has no depthwise_kernel",
)
def test_a_choice_is_of_one_depthwise_kernel_of_pytorch() -> None:
    """The setting changes what PyTorch would run, in a running process too."""
    kernels = ("auto", "native", "cudnn")
    for known, kernel in enumerate(kernels):
        torch._C._set_cudnn_depthwise_kernel(kernel)
        try:
            for _ in range(2):
                check_step("depthwise", sampling="race")
                assert len(ca.choices()) == 3 * (known + 1)
        finally:
            torch._C._set_cudnn_depthwise_kernel("auto")
    assert Counter(c.problem.depthwise_kernel for c in ca.choices()) == dict.fromkeys(kernels, 3)
    assert all(c.pytorch_ms is not None for c in ca.choices())


@pytest.mark.parametrize("name", ["dense", "ragged"])
@pytest.mark.parametrize("mode", ["race", "sustained"])
def test_of_mode_fallback_what_is_compiled_at_run_time_is_timed(mode: str, name: str) -> None:
    """It may be the fastest (docs/findings/fallback-mode.md). auto looks at few candidates."""
    check_step(name, sampling=mode)
    for choice in ca.choices():
        # auto may compile another kernel of the engine than the listed one.
        timed = {e.candidate.engine for e in choice.selection.ranking if e.time_ms is not None}
        for candidate in ca.expert.candidates(choice.problem, device="cuda"):
            if candidate.heuristic_mode == "FALLBACK" and candidate.is_compiled:
                assert candidate.engine in timed, candidate.text


def test_no_matrix_product_where_bits_must_repeat() -> None:
    torch.use_deterministic_algorithms(True)
    input, weight = operands("pointwise")
    first = ca.functional.conv2d(input, weight, sampling="auto")
    (choice,) = ca.choices()
    assert MATMUL.text not in texts(choice)
    for entry in choice.selection.ranking:
        assert "NONDETERMINISTIC" not in entry.candidate.notes
    for _ in range(3):
        assert torch.equal(ca.functional.conv2d(input, weight, sampling="auto"), first)


@pytest.mark.parametrize("name", ["pointwise", "pointwise_bf16"])
def test_a_matrix_product_serves(name: str) -> None:
    check_step(name, sampling=ONLY_MATMUL.name)
    made = ca.choices()
    assert {(c.problem.op, c.text, c.engine) for c in made} == {
        (op, MATMUL.text, None) for op in OPS
    }
    for choice in made:
        assert choice.relative_error < ALLOWED[choice.problem.dtype]
    check_step(name, sampling=ONLY_MATMUL.name)
    assert ca.choices() == made
    assert ca.fallbacks() == {}, "PyTorch's convolution was not asked"
    # Another thread has no plan yet, and takes the choice from its text.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(check_step, name, sampling=ONLY_MATMUL.name).result(timeout=120)
    assert ca.choices() == made
    assert ca.fallbacks() == {}


def test_a_matrix_product_takes_any_strides() -> None:
    """Whatever the strides of a channels_last input are, it is brought in order."""
    input, weight = operands("pointwise")
    wide = torch.cat([input, input], dim=3).to(memory_format=torch.channels_last)[..., ::2]
    for arranged in (wide, input[1:], input[:, :, 2:]):
        with ca.flags(ONLY_MATMUL.name, new_shapes="tune"):
            output = ca.functional.conv2d(arranged, weight)
        assert_close(output, expected("pointwise", arranged, weight), 4e-3)
    bias = torch.randn(96, device="cuda", dtype=torch.float16)
    output = ca.functional.conv2d(input, weight, bias, sampling=ONLY_MATMUL.name)
    right = expected("pointwise", input, weight) + bias.cpu().double()[:, None, None]
    assert_close(output, right, 4e-3)
    assert {c.text for c in ca.choices()} == {MATMUL.text}


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_tensors_are_left_alone(mode: str) -> None:
    input, weight = operands("dense")
    copies = input.clone(), weight.clone()
    ca.functional.conv2d(input, weight, padding=1, sampling=mode)
    assert torch.equal(input, copies[0])
    assert torch.equal(weight, copies[1])


@pytest.mark.parametrize("name", ["dense", "pointwise"])
def test_tuning_leaves_no_memory_behind(name: str) -> None:
    """cuBLAS keeps a workspace for every stream that it ever ran on: tuning must not use many."""
    input, weight = operands(name)
    allocated = []
    for _ in range(5):
        ca.forget()
        ca.functional.conv2d(input, weight, **LAYERS[name][4], sampling="auto")
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    # The first ones may load libraries.
    assert allocated[-1] <= allocated[1] + (1 << 20)
