"""A problem round-trips through JSON and text, and no two problems share a text."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from problem_fields import BASE, CHANGES
from problems import OPS, PROBLEMS, make

import cudnn_autotune as ca
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json

# What a text leaves out is not told by it.
TOLD = [change for change in CHANGES if "deterministic" not in change]


def changed() -> list[ca.ConvProblem]:
    return [ca.ConvProblem(**{**BASE, **change}) for change in [{}, *TOLD]]


def through_json(problem: ca.ConvProblem) -> ca.ConvProblem:
    return problem_from_json(json.loads(json.dumps(problem_to_json(problem))))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_round_trip(name: str, op: str) -> None:
    assert through_json(make(name, op)) == make(name, op)


@pytest.mark.parametrize("change", [*TOLD, {"deterministic": True}], ids=str)
def test_a_changed_field_round_trips(change: dict[str, Any]) -> None:
    problem = ca.ConvProblem(**{**BASE, **change})
    assert through_json(problem) == problem


def test_no_two_problems_share_a_text() -> None:
    texts = [problem_text(problem) for problem in changed()]
    assert len(set(texts)) == len(TOLD) + 1
    assert all(text.isprintable() for text in texts)


def test_the_changes_name_every_field_but_determinism() -> None:
    """A field added to ConvProblem must be added here."""
    assert set(ca.ConvProblem.__dataclass_fields__) == set(BASE)
    assert {name for change in TOLD for name in change} == set(BASE) - {"deterministic"}


def test_determinism_is_a_constraint_and_not_part_of_the_text() -> None:
    strict = ca.ConvProblem(**{**BASE, "deterministic": True})
    assert problem_text(strict) == problem_text(ca.ConvProblem(**BASE))


@pytest.mark.search
def test_the_text_is_the_extensions_own() -> None:
    for problem in changed():
        assert problem_text(problem) == problem.text


def test_the_text_can_be_read() -> None:
    assert problem_text(ca.ConvProblem(**{**BASE, "padding": (1, 2), "allow_tf32": False})) == (
        "fprop x=2x8x10x12 w=8x8x3x3 padding=1,2 stride=1,1 dilation=1,1 groups=1 "
        "float32 contiguous no_tf32"
    )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("op", "bprop", "problem.op: must be one of fprop, dgrad, wgrad"),
        ("input_shape", "64", "problem.input_shape: must be a list"),
        ("input_shape", [2, 8, -10, 12], r"problem.input_shape\[2\]"),
        ("input_shape", [2, 8, 10.5, 12], r"problem.input_shape\[2\]"),
        ("input_shape", [2, 9, 10, 12], "problem: input_shape must have 8 channels"),
        ("weight_shape", [8, 8, 30, 3], "problem: weight_shape: a kernel of"),
        ("stride", [1], "problem: stride must be 2 int"),
        ("groups", 0, "problem.groups"),
        ("groups", True, "problem.groups"),
        ("dtype", "int8", "problem.dtype: must be one of float16"),
        ("memory_format", "strided", "problem.memory_format"),
        ("deterministic", 1, "problem.deterministic: must be true or false"),
        ("alignment", [3, 32, 32], "problem: alignment must be three powers of two"),
    ],
)
def test_what_is_wrong_is_named(field: str, value: object, named: str) -> None:
    tree = {**problem_to_json(ca.ConvProblem(**BASE)), field: value}
    with pytest.raises(ValueError, match=named):
        problem_from_json(tree)


def test_channels_last_needs_two_dimensions_or_three() -> None:
    flat = ca.ConvProblem("fprop", (2, 8, 120), (8, 8, 3))
    tree = {**problem_to_json(flat), "memory_format": "channels_last"}
    with pytest.raises(ValueError, match=r"problem\.memory_format: must be contiguous with 1"):
        problem_from_json(tree)


def test_a_field_more_or_less_is_an_error() -> None:
    tree = problem_to_json(ca.ConvProblem(**BASE))
    for name in tree:
        fewer = copy.deepcopy(tree)
        del fewer[name]
        with pytest.raises(ValueError, match=f"problem.{name}: is missing"):
            problem_from_json(fewer)
    with pytest.raises(ValueError, match=r"problem\.colour: is not a known field"):
        problem_from_json({**tree, "colour": "red"})
