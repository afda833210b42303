"""Filters leave exactly what they promise, and each has something to remove."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import OPS, PROBLEMS, make

import cudnn_autotune as ca
from cudnn_autotune import _C

pytestmark = pytest.mark.search

Rule = Callable[[ca.Candidate], bool]


@functools.cache
def unfiltered(problem: ca.ConvProblem, gpu: str) -> tuple[ca.Candidate, ...]:
    return tuple(ca.candidates(problem, device=gpu, filtered=False))


def pool(**changes: object) -> list[ca.ConvProblem]:
    return [make(name, op, **changes) for name in PROBLEMS for op in OPS]


# Some of these are known to be wrong for some problems (csrc/core/errata.cpp), and go as well.
ERRATA_ENGINES = {1, 17, 20}
SEEN_WITH = 91900


def removed(problem: ca.ConvProblem, gpu: str, forbidden: Rule) -> int:
    """Assert that exactly the forbidden candidates are gone, in order; how many those are."""
    everything = unfiltered(problem, gpu)
    left = ca.candidates(problem, device=gpu)
    assert not any(forbidden(c) for c in left), problem.text
    assert [c.text for c in left if c.engine not in ERRATA_ENGINES] == [
        c.text for c in everything if not forbidden(c) and c.engine not in ERRATA_ENGINES
    ], problem.text
    return sum(forbidden(c) for c in everything)


def always(c: ca.Candidate) -> bool:
    """PyTorch never takes these, whatever the flags."""
    return "DOWN_CONVERT_INPUTS" in c.notes


@pytest.mark.parametrize("gpu", ["h200", "t4"])
def test_nothing_else_goes_by_default(gpu: str) -> None:
    """No engine that these heuristics list converts its inputs down, so nothing goes at all."""
    for problem in pool():
        removed(problem, gpu, always)


@pytest.mark.parametrize("padding", [(1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 1)], ids=str)
def test_engines_that_ignore_the_far_padding_are_left_out(padding: tuple[int, ...]) -> None:
    """Engines 1 and 20 of wgrad pad after as they do before."""
    problem = make("resnet_fp16_nhwc", "wgrad", padding=padding)
    everything = {c.engine for c in unfiltered(problem, "h200")}
    left = {c.engine for c in ca.candidates(problem, device="h200")}
    assert everything & {1, 20}
    is_seen = _C.cudnn_runtime_version() // 100 == SEEN_WITH // 100
    goes = is_seen and padding != (1, 1, 1, 1)
    assert everything - left == (everything & {1, 20} if goes else set())


@pytest.mark.parametrize(
    ("engine", "changes"),
    [(1, {"padding": (0, 0, 1, 1)}), (20, {"padding": (0, 0, 1, 1)}),
     (17, {"dtype": torch.float32, "allow_tf32": False}),
     (67, {"dtype": torch.float32, "alignment": (8, 32, 32)}),
     (67, {"dtype": torch.float32, "alignment": (32, 32, 4)})],
)  # fmt: skip
def test_an_erratum_is_of_the_cudnn_that_it_was_seen_with(
    engine: int, changes: dict[str, Any]
) -> None:
    """The number may be another engine's in another version, or that of one that was mended."""

    def is_wrong(op: str, version: int, number: int = engine, **fields: Any) -> bool:
        problem = make("resnet_fp16_nhwc", op, **fields)
        return _C.is_known_wrong(f"eng{number}:WORKSPACE=0", problem.native(), version)

    assert is_wrong("wgrad", SEEN_WITH, **changes)
    assert is_wrong("wgrad", SEEN_WITH + 1, **changes), "a patch mends no engine that we know of"
    for version in (SEEN_WITH - 100, SEEN_WITH + 100, 101900, 91):
        assert not is_wrong("wgrad", version, **changes)
    assert not is_wrong("wgrad", SEEN_WITH)
    assert not is_wrong("wgrad", SEEN_WITH, number=2, **changes)
    assert not is_wrong("fprop", SEEN_WITH, **changes)
    assert not is_wrong("dgrad", SEEN_WITH, **changes)


@pytest.mark.parametrize(
    ("image", "fields", "expected"),
    [
        (1, {"bias": True}, True),
        (1, {"bias": True, "activation": "relu"}, True),
        (2, {"bias": True}, False),
        (1, {}, False),
    ],
)
def test_an_engine_is_wrong_for_one_place_with_a_bias(
    image: int, fields: dict[str, Any], expected: bool
) -> None:
    shapes = {"input_shape": (3, 16, image, image), "weight_shape": (8, 16, 1, 1), "padding": 0}
    problem = ca.ConvProblem("fprop", dtype=torch.float16, **shapes, **fields)
    assert _C.is_known_wrong("eng52", problem.native(), SEEN_WITH) is expected
    assert not _C.is_known_wrong("unfused:eng52", problem.native(), SEEN_WITH), "another engine"


def test_deterministic_leaves_no_nondeterministic_engine() -> None:
    gone = sum(
        removed(problem, "h200", lambda c: always(c) or "NONDETERMINISTIC" in c.notes)
        for problem in pool(deterministic=True)
    )
    assert gone > 0
    assert any("NONDETERMINISTIC" in c.notes for p in pool() for c in unfiltered(p, "h200"))


def test_fp32_without_tf32_leaves_no_tensor_core_engine() -> None:
    gone = sum(
        removed(problem, "h200", lambda c: always(c) or "TENSOR_CORE" in c.notes)
        for problem in pool(
            dtype=torch.float32, memory_format=torch.contiguous_format, allow_tf32=False
        )
    )
    assert gone > 0


def test_tf32_says_nothing_about_half_precision() -> None:
    for op in OPS:
        with_tf32, without = (
            ca.candidates(make("resnet_fp16_nhwc", op, allow_tf32=allow), device="h200")
            for allow in (True, False)
        )
        assert [c.text for c in with_tf32] == [c.text for c in without]
        assert any("TENSOR_CORE" in c.notes for c in without)


def test_full_precision_reductions_leave_no_reduced_one() -> None:
    gone = sum(
        removed(problem, gpu, lambda c: always(c) or "REDUCED_PRECISION_REDUCTION" in c.notes)
        for problem in pool(
            dtype=torch.float16,
            memory_format=torch.contiguous_format,
            allow_reduced_precision=False,
        )
        for gpu in ("h200", "t4")
    )
    assert gone > 0


@pytest.mark.parametrize("op", OPS)
def test_workspace_limit(op: str) -> None:
    problem = make("resnet_fp16_nhwc", op)
    everything = ca.candidates(problem, device="h200")
    sizes = sorted({c.workspace_bytes for c in everything})
    assert len(sizes) > 1, "every candidate wants the same workspace: the limit is not tested"
    for limit in (0, sizes[0], sizes[-1] - 1, sizes[-1], None):
        left = ca.candidates(problem, device="h200", workspace_limit=limit)
        assert [c.text for c in left] == [
            c.text for c in everything if limit is None or c.workspace_bytes <= limit
        ]


def test_ranks_stay_dense_after_filtering() -> None:
    problem = make("forum_fp32_nchw", "wgrad", allow_tf32=False, deterministic=True)
    left = ca.candidates(problem, device="h200", workspace_limit=0)
    assert [c.rank for c in left] == list(range(len(left)))
    assert len(left) < len(unfiltered(problem, "h200"))
