"""ConvProblem: what it accepts, what it refuses, and the shape of its result."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.conv.problem_fields import BASE, CHANGES
from support.conv.references import CONVOLUTIONS, convolution
from torch.utils.flop_counter import conv_flop_count

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import OPERATIONS
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json

GOOD: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (2, 8, 10, 12),
    "weight_shape": (6, 4, 3, 3),
    "groups": 2,
    "dtype": torch.float16,
}


BAD: dict[str, list[Any]] = {
    "op": ["forward", ""],
    "input_shape": [(2, 8), (2, 8, 4, 4, 4, 4), (2, 8, -1, 12), "2x8x10x12", 5, (1,) * 1_000_000],
    "weight_shape": [(6, 4, 3), (6, 4, 0, 3), (6, 4, 3, 3, 3)],
    "stride": [0, (1, -1), (1, 1, 1), None],
    "padding": [-1, (0, 0, 0), "full"],
    "dilation": [0, (1, 1, 1)],
    "groups": [0, -2, 3, 1, None, (1,)],
    "dtype": [torch.int32, torch.complex64, "float16", [], "x" * 1_000_000],
    "memory_format": [torch.preserve_format, torch.channels_last_3d],
    "alignment": [(32, 32), (32, 32, 24), 32],
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [pytest.param(a, v, id=f"{a}{i}") for a, vs in BAD.items() for i, v in enumerate(vs)],
)
def test_bad_values_are_named(argument: str, value: Any) -> None:
    ca.ConvProblem(**GOOD)
    with pytest.raises((ValueError, TypeError), match=argument) as raised:
        ca.ConvProblem(**{**GOOD, argument: value})
    assert len(str(raised.value)) < 250


def test_kernel_larger_than_the_padded_input() -> None:
    ca.ConvProblem(op="fprop", input_shape=(2, 4, 4, 4), weight_shape=(4, 4, 6, 6), padding=1)
    with pytest.raises(ValueError, match=r"weight_shape|input_shape"):
        ca.ConvProblem(op="fprop", input_shape=(2, 4, 4, 4), weight_shape=(4, 4, 7, 7), padding=1)


def test_the_dilation_of_one_element_is_one() -> None:
    """It says nothing of what is computed, so that it must not make two keys of one problem."""
    shapes = {"input_shape": (2, 8, 10, 12), "weight_shape": (6, 8, 1, 3)}
    problem = ca.ConvProblem("dgrad", **shapes, dilation=(2**31 - 1, 2))
    assert problem.dilation == (1, 2)
    assert problem == ca.ConvProblem("dgrad", **shapes, dilation=(1, 2))


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("input_shape", {"input_shape": (1, 1, 2**16, 2**15), "weight_shape": (1, 1, 3, 3)}),
        ("weight_shape", {"input_shape": (1, 2, 1, 1), "weight_shape": (2**30, 2, 1, 1)}),
        (
            "input_shape",  # the output
            {"input_shape": (2**12, 1, 2**9, 1), "weight_shape": (2**10, 1, 1, 1)},
        ),
        (
            "padding",
            {"input_shape": (1, 1, 1), "weight_shape": (1, 1, 3), "padding": (2**30, 2**30 - 1)},
        ),
        (
            "dilation",
            {
                "input_shape": (8, 16, 32),
                "weight_shape": (16, 16, 2),
                "stride": 2**16,
                "padding": 2**14,
                "dilation": 2**15,
            },
        ),
    ],
)
def test_what_cudnn_cannot_count_is_refused(argument: str, fields: dict[str, Any]) -> None:
    """It counts in 32 bits; 9.19 dies of a division by zero where a product overflows."""
    with pytest.raises(ValueError, match=rf"{argument}: .* must be below 2\*\*31, got {2**31}$"):
        ca.ConvProblem("dgrad", **fields)


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))

    def per_dim(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.sampled_from([1, 2, 3]))
    kernel, dilation = per_dim(1, 4), per_dim(1, 3)
    room = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    return {
        "input_shape": (
            draw(st.integers(1, 2)),
            2 * groups,
            *(r + extra for r, extra in zip(room, per_dim(0, 5), strict=True)),
        ),
        "weight_shape": (groups * draw(st.integers(1, 2)), 2, *kernel),
        "stride": per_dim(1, 3),
        "padding": per_dim(0, 3) + per_dim(0, 3),
        "dilation": dilation,
        "groups": groups,
        "dtype": torch.float32,
    }


@given(geometries())
def test_output_shape_is_pytorchs(geometry: dict[str, Any]) -> None:
    problem = ca.ConvProblem(op="fprop", **geometry)
    output = convolution(
        torch.empty(problem.input_shape, device="meta"),
        torch.empty(problem.weight_shape, device="meta"),
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
    )
    assert problem.output_shape == tuple(output.shape)
    for op in ("dgrad", "wgrad"):
        assert ca.ConvProblem(op=op, **geometry).output_shape == tuple(output.shape)


@given(geometries())
def test_flops_are_what_pytorch_counts(geometry: dict[str, Any]) -> None:
    for op in OPERATIONS:
        problem = ca.ConvProblem(op=op, **geometry)
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        assert problem.flops == conv_flop_count(*map(list, shapes))


@given(geometries(), st.sampled_from(["same", "valid"]))
def test_named_padding_is_pytorchs(geometry: dict[str, Any], padding: str) -> None:
    geometry = {**geometry, "padding": padding, "stride": 1}
    problem = ca.ConvProblem(op="fprop", **geometry)
    input = torch.randn(problem.input_shape)
    weight = torch.randn(problem.weight_shape)
    expected = CONVOLUTIONS[len(problem.stride)](
        input, weight, None, 1, padding, problem.dilation, problem.groups
    )
    assert problem.output_shape == tuple(expected.shape)
    # Values too: the extra element of an even kernel goes to the far side.
    actual = convolution(
        input,
        weight,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.search
def test_integers_and_short_tuples_expand() -> None:
    short = ca.ConvProblem(**{**GOOD, "stride": 2, "padding": 1, "dilation": 1})
    middle = ca.ConvProblem(**{**GOOD, "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)})
    long = ca.ConvProblem(**{**GOOD, "stride": [2, 2], "padding": (1, 1, 1, 1)})
    assert short == middle == long
    assert hash(short) == hash(middle) == hash(long)
    assert short.text == middle.text == long.text
    assert (short.stride, short.padding, short.dilation) == ((2, 2), (1, 1, 1, 1), (1, 1))


# A problem round-trips through JSON; its text is that of C++, which test_keys compares

# Changes of what the text of a problem shows; determinism is not in it.
TOLD = [change for change in CHANGES if "deterministic" not in change]


def changed() -> list[ca.ConvProblem]:
    return [ca.ConvProblem(**{**BASE, **change}) for change in [{}, *TOLD]]


def through_json(problem: ca.ConvProblem) -> ca.ConvProblem:
    return problem_from_json(json.loads(json.dumps(problem_to_json(problem))))


@pytest.mark.parametrize("change", [*TOLD, {"deterministic": True}], ids=str)
def test_a_changed_field_round_trips(change: dict[str, Any]) -> None:
    problem = ca.ConvProblem(**{**BASE, **change})
    assert through_json(problem) == problem


def test_determinism_is_a_constraint_and_not_part_of_the_text() -> None:
    strict = ca.ConvProblem(**{**BASE, "deterministic": True})
    assert problem_text(strict) == problem_text(ca.ConvProblem(**BASE))


@pytest.mark.search
def test_the_text_is_the_extensions_own() -> None:
    for problem in changed():
        assert problem_text(problem) == problem.text


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


SLICED: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (2, 24, 8, 8),
    "weight_shape": (3, 24, 3, 3),
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}


@pytest.mark.parametrize("pixel_strides", [(48, 3), (24, 16), (32, 16)])
def test_one_side_may_be_dense(pixel_strides: tuple[int, int]) -> None:
    """It has any number of channels then."""
    problem = ca.ConvProblem(**SLICED, pixel_strides=pixel_strides)
    assert problem.strides[0][3] == pixel_strides[0]
    assert problem.strides[2][3] == pixel_strides[1]
    assert ca.ConvProblem.from_native(problem.native()) == problem


@pytest.mark.parametrize("pixel_strides", [(40, 16), (16, 16), (48, 2), (48, 8), (48,), 48])
def test_slices_are_multiples_of_32_bytes(pixel_strides: Any) -> None:
    assert ca.ConvProblem(**SLICED, pixel_strides=(24, 3)).pixel_strides is None
    wanted = "pixel_strides must be 24 and 3, the channels of input and output, or larger multiples"
    with pytest.raises(ValueError, match=f"{wanted} of 16, got"):
        ca.ConvProblem(**SLICED, pixel_strides=pixel_strides)
