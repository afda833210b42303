"""Candidates that no heuristic lists: other kernels of compiled engines, PyTorch's own ways."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.problems import OPS, PROBLEMS, make
from support.conv.references import assert_close, random_operands, reference
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.unlisted import (
    KERNEL_CFGS,
    MATMUL,
    kernel_cfgs,
    other_kernels,
    without_cudnn,
)

pytestmark = pytest.mark.search

COMPILED = ("RUNTIME_COMPILATION",)
PORTFOLIOS = kernel_cfgs(_C.cudnn_runtime_version())
POINTWISE: dict[str, Any] = {
    "input_shape": (4, 64, 14, 14),
    "weight_shape": (96, 64, 1, 1),
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}
CHANGES: dict[str, dict[str, Any]] = {
    "contiguous": {"memory_format": torch.contiguous_format},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "deterministic": {"deterministic": True},
    "3x3": {"weight_shape": (96, 64, 3, 3)},
    "1x3": {"weight_shape": (96, 64, 1, 3)},
    "stride": {"stride": 2},
    "stride in one dimension": {"stride": (1, 2)},
    "padding": {"padding": 1},
    "padding before": {"padding": (0, 1, 0, 0)},
    "padding after": {"padding": (0, 0, 0, 1)},
    "groups of few channels": {"weight_shape": (96, 4, 1, 1), "groups": 16},
}


def listed(problem: ca.ConvProblem, device: str = "h200") -> list[ca.expert.Candidate]:
    return ca.expert.candidates(problem, device=device)


def compiled_config(**changes: Any) -> ca.expert.Candidate:
    engine = changes.pop("engine", 78)
    knobs = changes.pop("knobs", {"KERNEL_CFG": 3})
    text = ca.expert.engine_text(engine, knobs)
    found = ca.expert.Candidate(engine, knobs, 512, ("TENSOR_CORE",), COMPILED, text, "A", 4)
    return replace(found, **changes)


# PyTorch's own path and the matrix product


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_pointwise_layer_is_a_matrix_product(dtype: torch.dtype, op: str) -> None:
    problem = ca.ConvProblem(op, **{**POINTWISE, "dtype": dtype})
    assert without_cudnn(problem, None) == [OWN_PATH, MATMUL]
    # Dilation of a kernel of one tap is none.
    dilated = ca.ConvProblem(op, **{**POINTWISE, "dtype": dtype, "dilation": 2})
    assert without_cudnn(dilated, None) == [OWN_PATH, MATMUL]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("what", CHANGES)
def test_anything_else_is_not(what: str, op: str) -> None:
    problem = ca.ConvProblem(op, **{**POINTWISE, **CHANGES[what]})
    assert not _C.is_matmul(problem.native())
    assert without_cudnn(problem, None) == [OWN_PATH]


def operands_of(problem: ca.ConvProblem) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """(x, w, y) with NaN in the one that is written; that one; and what it must become."""
    a, b = random_operands(problem)
    right = reference(problem, a, b)
    written = torch.full_like(right, math.nan, dtype=problem.dtype)
    written = written.contiguous(memory_format=problem.memory_format)
    tensors = {"fprop": (a, b, written), "dgrad": (written, b, a), "wgrad": (b, written, a)}
    return tensors[problem.op], written, right


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "groups", "is_last"),
    [
        ((4, 64, 14, 14), (96, 64, 1, 1), 1, True),
        ((3, 24, 7, 5), (1, 24, 1, 1), 1, True),
        ((3, 1, 7, 5), (40, 1, 1, 1), 1, True),
        ((5, 32, 1, 1), (16, 32, 1, 1), 1, True),
        ((1, 3, 1, 1), (1, 3, 1, 1), 1, True),
        ((2, 16, 4, 5, 6), (24, 16, 1, 1, 1), 1, True),
        ((3, 64, 9, 7), (12, 16, 1, 1), 4, True),
        ((1, 64, 9, 7), (12, 16, 1, 1), 4, False),
        ((1, 24, 9, 7), (40, 24, 1, 1), 1, False),
        ((1, 32, 50), (16, 16, 1), 2, False),
        ((5, 32, 1, 1), (16, 32, 1, 1), 1, False),
        ((6, 8, 3, 5), (24, 8, 3, 5), 1, False),
        ((6, 8, 3, 5), (24, 8, 3, 5), 1, True),
        ((6, 3, 2, 4, 3), (24, 3, 2, 4, 3), 1, False),
        ((6, 3, 2, 4, 3), (24, 3, 2, 4, 3), 1, True),
        ((6, 8, 15), (24, 8, 15), 1, False),
    ],
)
def test_matrix_products_on_the_cpu(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    groups: int,
    is_last: bool,
    op: str,
) -> None:
    """cuBLAS is ATen's business; which tensor is which, and transposed how, is ours."""
    layout = torch.channels_last if len(input_shape) == 4 else torch.channels_last_3d
    problem = ca.ConvProblem(
        op,
        input_shape,
        weight_shape,
        groups=groups,
        dtype=torch.bfloat16,
        memory_format=layout if is_last else torch.contiguous_format,
    )
    assert _C.is_matmul(problem.native())
    tensors, written, right = operands_of(problem)
    assert _C.execute(_C.build_plan(problem.native(), "matmul", 0), *tensors) is written
    assert_close(written, right, 1e-2, problem.text)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["grouped_fp16", "strided_dilated_fp32", "asymmetric"])
def test_pytorchs_own_path_on_the_cpu(name: str, op: str) -> None:
    geometries = {
        "grouped_fp16": {
            "input_shape": (2, 8, 9, 8),
            "weight_shape": (6, 4, 3, 3),
            "groups": 2,
            "memory_format": torch.channels_last,
        },
        "strided_dilated_fp32": {
            "input_shape": (2, 3, 11, 12),
            "weight_shape": (4, 3, 3, 2),
            "stride": (2, 1),
            "dilation": (1, 2),
            "padding": (1, 2),
        },
        "asymmetric": {
            "input_shape": (2, 3, 8, 7),
            "weight_shape": (4, 3, 3, 3),
            "padding": (0, 2, 1, 0),
        },
    }
    problem = ca.ConvProblem(op, **geometries[name])  # type: ignore[arg-type]
    tensors, written, right = operands_of(problem)
    result = _C.execute(_C.build_plan(problem.native(), "aten", 0), *tensors)
    assert result.is_contiguous(memory_format=problem.memory_format)
    assert bool(written.isnan().all()), "the result is a tensor of its own"
    assert_close(result, right, 1e-5, name)


# Other kernels


@pytest.mark.parametrize(
    ("cudnn_version", "found_with"),
    [(91900, (9, 19)), (91903, (9, 19)), (92100, (9, 19)), (91899, None), (8907, None),
     (101900, None)],
)  # fmt: skip
def test_a_portfolio_is_of_the_cudnn_that_it_was_found_with(
    cudnn_version: int, found_with: tuple[int, int] | None
) -> None:
    expected = {} if found_with is None else KERNEL_CFGS[found_with]
    assert kernel_cfgs(cudnn_version) == expected


@pytest.mark.parametrize("engine", PORTFOLIOS)
def test_the_portfolio_of_a_compiled_engine(engine: int) -> None:
    of_list = compiled_config(engine=engine, knobs={"KERNEL_CFG": 99, "WORKSPACE": 1})
    found = other_kernels([of_list])
    assert tuple(c.knobs["KERNEL_CFG"] for c in found) == PORTFOLIOS[engine]
    for c in found:
        assert c.engine == engine
        assert {**c.knobs, "KERNEL_CFG": 99} == of_list.knobs
        assert ca.expert.parse_engine_text(c.text) == (c.engine, c.knobs)
        assert ca.expert.engine_text(engine, c.knobs) == c.text
        assert c.heuristic_mode == ""
        assert c.is_compiled
        assert c.rank > of_list.rank
        assert (c.numerical_notes, c.workspace_bytes) == (("TENSOR_CORE",), 512)
    assert len({c.rank for c in found}) == len(found)


def test_what_is_listed_is_not_offered_again() -> None:
    engine, values = next(iter(PORTFOLIOS.items()))
    first, second = values[:2]
    configs = [
        compiled_config(engine=engine, knobs={"KERNEL_CFG": value}) for value in (first, second)
    ]
    found = other_kernels(configs)
    texts = [c.text for c in [*configs, *found]]
    assert len(set(texts)) == len(texts)
    assert {c.knobs["KERNEL_CFG"] for c in found} == set(values) - {first, second}
    # An iterator is as good as a list.
    assert other_kernels(iter(configs)) == found


def test_only_compiled_engines_with_a_portfolio_have_other_kernels() -> None:
    plain = compiled_config(behavior_notes=())
    assert other_kernels([plain, compiled_config(engine=67), OWN_PATH, MATMUL]) == []
    assert other_kernels([]) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_of_real_lists(name: str, op: str) -> None:
    """As cuDNN answers for an H200; which engines are compiled depends on its version."""
    problem = make(name, op)
    of_list = listed(problem)
    found = other_kernels(of_list)
    texts = [c.text for c in [*of_list, *found]]
    assert len(set(texts)) == len(texts)
    with_portfolio = [c for c in of_list if c.is_compiled and c.engine in PORTFOLIOS]
    assert bool(found) == bool(with_portfolio)
    search = open_search(problem, "h200")
    for c in found[:2]:
        # Some values do not exist for a problem: a clean refusal, and no plan.
        ((plan, error),) = search.build_many([c.text], 1)
        assert (plan is None) == bool(error)
        assert plan is None or plan.text == c.text


@pytest.mark.parametrize("name", ["resnet_fp16_nhwc", "forum_fp32_nchw"])
def test_texts_of_other_knob_values_build_or_are_refused(name: str) -> None:
    """As :func:`other_kernels` makes them, from engines that this cuDNN has for certain."""
    problem = make(name)
    search = open_search(problem, "h200")
    first = next(c for c in listed(problem) if c.knobs)
    built = {}
    for knob in first.knobs:
        for value in (0, 1, 10_000):
            text = ca.expert.engine_text(first.engine or 0, {**first.knobs, knob: value})
            ((plan, error),) = search.build_many([text], 1)
            assert (plan is None) == bool(error)
            assert plan is not None or text.split(":")[0] in error
            built[text] = plan is not None
    assert not all(built.values()), "a value of 10,000 must be refused"
    ((plan, error),) = search.build_many([first.text], 1)
    assert plan.text == first.text


@pytest.mark.parametrize("text", ["nonsense", "eng67:KNOB_X=0", ""])
def test_a_text_that_does_not_parse_is_a_config_that_does_not_build(text: str) -> None:
    """It may come from a store that another version has written, beside others that build."""
    problem = make("resnet_fp16_nhwc", "dgrad")
    good = listed(problem)[0].text
    search = open_search(problem, "h200")
    built = search.build_many([text, good, text], 2)
    assert [plan and plan.text for plan, _ in built] == [None, good, None]
    assert [bool(error) for _, error in built] == [True, False, True]
    assert "does not parse" in built[0][1]
    for ask in (search.build, search.describe):
        with pytest.raises(ca.CudnnError, match="does not parse"):
            ask(text)
    with pytest.raises(ValueError, match="does not parse"):
        ca.expert.build_plan(problem, text, device="h200")
