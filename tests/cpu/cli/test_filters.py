"""Filters leave exactly what they promise, and each has something to remove."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.problems import OPS, PROBLEMS, make

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines import devices

pytestmark = pytest.mark.search

Rule = Callable[[ca.expert.Candidate], bool]


@functools.cache
def unfiltered(problem: ca.ConvProblem, gpu: str) -> tuple[ca.expert.Candidate, ...]:
    return tuple(ca.expert.candidates(problem, device=gpu, filtered=False))


def pool(**changes: object) -> list[ca.ConvProblem]:
    return [make(name, op, **changes) for name in PROBLEMS for op in OPS]


# Some of these are known to be wrong for some problems (csrc/core/cudnn/errata.cpp), and go as
# well.
ERRATA_ENGINES = {1, 17, 20}
SEEN_WITH = 91900


def removed(problem: ca.ConvProblem, gpu: str, forbidden: Rule) -> int:
    """Assert that exactly the forbidden candidates are gone, in order; how many those are."""
    everything = unfiltered(problem, gpu)
    left = ca.expert.candidates(problem, device=gpu)
    assert not any(forbidden(c) for c in left), problem.text
    assert [c.text for c in left if c.engine not in ERRATA_ENGINES] == [
        c.text for c in everything if not forbidden(c) and c.engine not in ERRATA_ENGINES
    ], problem.text
    return sum(forbidden(c) for c in everything)


def always(c: ca.expert.Candidate) -> bool:
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
    left = {c.engine for c in ca.expert.candidates(problem, device="h200")}
    assert everything & {1, 20}
    goes = _C.cudnn_runtime_version() >= SEEN_WITH and padding != (1, 1, 1, 1)
    assert everything - left == (everything & {1, 20} if goes else set())


FLOAT32: dict[str, Any] = {"dtype": torch.float32}
CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
ASYMMETRIC: dict[str, Any] = {"padding": (0, 0, 1, 1)}
DEPTHWISE: dict[str, Any] = {"weight_shape": (64, 1, 3, 3), "groups": 64}
# Of one dimension, with 64 channels in images of 56.
ONE_DIMENSION: dict[str, Any] = {
    "input_shape": (8, 64, 56), "weight_shape": (64, 1, 3), "groups": 64, **CONTIGUOUS,
}  # fmt: skip
ODD_GROUPS: dict[str, Any] = {
    "input_shape": (8, 12, 56, 56), "weight_shape": (12, 4, 3, 3), "groups": 3,
}  # fmt: skip
# Images with an output of no multiple of 128 bytes.
ODD_IMAGES: dict[str, Any] = {
    "input_shape": (1, 64, 55, 55), "weight_shape": (24, 64, 3, 3), **CONTIGUOUS,
}  # fmt: skip


ERRATA: list[tuple[str, int, dict[str, Any]]] = [
    ("wgrad", 1, ASYMMETRIC), ("wgrad", 18, ASYMMETRIC), ("wgrad", 20, ASYMMETRIC),
    ("dgrad", 50, ASYMMETRIC),
    ("fprop", 5, {**ONE_DIMENSION, "padding": (1, 0)}),
    ("dgrad", 6, {**ONE_DIMENSION, "padding": (1, 0)}),
    ("wgrad", 16, {**ONE_DIMENSION, "padding": (1, 0)}),
    ("wgrad", 17, {**FLOAT32, "allow_tf32": False}),
    ("fprop", 57, {**DEPTHWISE, "alignment": (8, 32, 32)}),
    ("wgrad", 61, {**DEPTHWISE, "alignment": (32, 8, 32)}),
    ("dgrad", 62, {**DEPTHWISE, "alignment": (32, 32, 4)}),
    ("wgrad", 67, {**FLOAT32, "alignment": (8, 32, 32)}),
    ("wgrad", 67, {**FLOAT32, "alignment": (32, 32, 4)}),
    ("wgrad", 67, {**FLOAT32, "alignment": (32, 8, 32)}),
    ("wgrad", 70, ODD_IMAGES), ("dgrad", 78, ODD_IMAGES),
    ("wgrad", 70, {"stride": (1, 9)}), ("wgrad", 70, {"stride": 16}),
    ("fprop", 4, {"stride": (16, 1)}), ("fprop", 53, {"stride": (1, 14)}),
    *(("wgrad", engine, ODD_GROUPS) for engine in (9, 10, 23, 30)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "engine", "changes"), ERRATA)
def test_an_erratum_holds_from_the_cudnn_that_it_was_seen_with(
    op: str, engine: int, changes: dict[str, Any]
) -> None:
    """No later version is known in which one was tried and found mended."""

    def is_wrong(version: int, op: str = op, number: int = engine, **fields: Any) -> bool:
        problem = make("resnet_fp16_nhwc", op, **fields)
        return _C.is_known_wrong(f"eng{number}:WORKSPACE=0", problem.native(), version)

    assert is_wrong(SEEN_WITH, **changes)
    for version in (SEEN_WITH + 1, SEEN_WITH + 100, 92400, 92600, 101900):
        assert is_wrong(version, **changes)
    for version in (SEEN_WITH - 100, 81900, 91):
        assert not is_wrong(version, **changes)
    assert not is_wrong(SEEN_WITH)
    assert not is_wrong(SEEN_WITH, number=2, **changes)
    for other in set(OPS) - {op}:
        assert not is_wrong(SEEN_WITH, other, **changes)


@pytest.mark.parametrize(
    ("version", "capability", "deterministic", "expected"),
    [
        (92301, 86, True, True),
        (92301, 86, False, False),
        (92301, 89, True, False),
        (92301, 80, True, False),
        (92301, 0, True, False),
        (92400, 86, True, False),
        (92200, 86, True, False),
    ],
)
def test_an_engine_that_differs_from_run_to_run_is_wrong_where_that_matters(
    version: int, capability: int, deterministic: bool, expected: bool
) -> None:
    def is_wrong(engine: str, op: str = "fprop") -> bool:
        native = make("resnet_fp16_nhwc", op, deterministic=deterministic).native()
        return _C.is_known_wrong(engine, native, version, capability)

    assert is_wrong("eng5:WORKSPACE=0") is expected
    assert not is_wrong("eng6")
    assert not is_wrong("eng5", "wgrad")


@pytest.mark.parametrize(("gpu", "expected"), [("t4", 75), ("a100", 80), ("l4", 89), ("h200", 90)])
def test_a_candidate_knows_the_gpu_that_errata_are_of(gpu: str, expected: int) -> None:
    problem = make("resnet_fp16_nhwc")
    search = _C.EngineList.by_properties(problem.native(), devices.load(gpu))
    listed = search.query("A")
    found = {c.compute_capability for c in [*listed, search.describe(listed[0].text)]}
    assert found == {expected}


def test_the_installed_cudnns_wrong_engines_are_left_out() -> None:
    """Of what it lists, by the properties of a GPU; engines that are compiled at run time it lists
    only beside a driver."""
    seen = set()
    for op, engine, changes in ERRATA:
        problem = make("resnet_fp16_nhwc", op, **changes)
        everything = {c.engine for c in unfiltered(problem, "h100")}
        left = {c.engine for c in ca.expert.candidates(problem, device="h100")}
        if _C.cudnn_runtime_version() >= SEEN_WITH:
            assert engine not in left, problem.text
        if engine in everything:
            seen.add((op, engine))
    assert {("wgrad", 1), ("wgrad", 20), ("wgrad", 67), ("wgrad", 9), ("wgrad", 10)} <= seen


@pytest.mark.parametrize(
    ("op", "engine", "changes"),
    [("wgrad", 70, {**ODD_IMAGES, "input_shape": (1, 64, 64, 64)}),
     ("wgrad", 70, {**ODD_IMAGES, "memory_format": torch.channels_last}),
     ("wgrad", 70, {"stride": 8}), ("fprop", 4, {"stride": (8, 2)}),
     ("wgrad", 9, {**ODD_GROUPS, "groups": 2, "input_shape": (8, 8, 56, 56),
                   "weight_shape": (8, 4, 3, 3)}),
     ("wgrad", 9, {**ODD_GROUPS, "weight_shape": (24, 4, 3, 3)}),
     ("wgrad", 9, {**ODD_GROUPS, **CONTIGUOUS}),
     ("fprop", 5, {**ONE_DIMENSION, "padding": (1, 1)}),
     ("fprop", 57, {**DEPTHWISE, "alignment": (16, 16, 16)}),
     ("wgrad", 67, {"alignment": (8, 8, 8)})],
)  # fmt: skip
def test_an_erratum_is_of_the_problems_that_it_was_seen_with(
    op: str, engine: int, changes: dict[str, Any]
) -> None:
    problem = make("resnet_fp16_nhwc", op, **changes)
    assert not _C.is_known_wrong(f"eng{engine}", problem.native(), SEEN_WITH)


def test_a_mode_that_ends_the_process_is_not_asked() -> None:
    """cuDNN 9.19 ends it where padding after as before would leave no output; 9.24 does not. From
    9.26 on mode B has no engine for such a layer."""
    shapes = {"input_shape": (1, 28, 1, 47), "weight_shape": (28, 4, 3, 3), "groups": 7}

    def asked(padding: tuple[int, ...]) -> set[str]:
        problem = make("resnet_fp16_nhwc", "wgrad", padding=padding, **shapes)
        return {c.heuristic_mode for c in unfiltered(problem, "h200")}

    is_seen = SEEN_WITH <= _C.cudnn_runtime_version() < 92400
    assert "A" in asked((1, 2, 1, 2))
    assert ("B" in asked((1, 2, 1, 2))) is (_C.cudnn_runtime_version() < 92600)
    assert "A" in asked((0, 2, 3, 2))
    assert not (is_seen and "B" in asked((0, 2, 3, 2)))


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
            ca.expert.candidates(make("resnet_fp16_nhwc", op, allow_tf32=allow), device="h200")
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
    everything = ca.expert.candidates(problem, device="h200")
    sizes = sorted({c.workspace_bytes for c in everything})
    assert len(sizes) > 1, "every candidate wants the same workspace: the limit is not tested"
    for limit in (0, sizes[0], sizes[-1] - 1, sizes[-1], None):
        left = ca.expert.candidates(problem, device="h200", workspace_limit=limit)
        assert [c.text for c in left] == [
            c.text for c in everything if limit is None or c.workspace_bytes <= limit
        ]


def test_ranks_stay_dense_after_filtering() -> None:
    problem = make("forum_fp32_nchw", "wgrad", allow_tf32=False, deterministic=True)
    left = ca.expert.candidates(problem, device="h200", workspace_limit=0)
    assert [c.rank for c in left] == list(range(len(left)))
    assert len(left) < len(unfiltered(problem, "h200"))
