"""ConvProblem: what it accepts, what it refuses, and the shape of its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from references import CONVOLUTIONS, convolution
from torch.utils.flop_counter import conv_flop_count

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import OPERATIONS

GOOD: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (2, 8, 10, 12),
    "weight_shape": (6, 4, 3, 3),
    "groups": 2,
    "dtype": torch.float16,
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("op", "forward"),
        ("op", ""),
        ("input_shape", (2, 8)),
        ("input_shape", (2, 8, 4, 4, 4, 4)),
        ("input_shape", (2, 8, -1, 12)),
        ("input_shape", "2x8x10x12"),
        ("weight_shape", (6, 4, 3)),
        ("weight_shape", (6, 4, 0, 3)),
        ("weight_shape", (6, 4, 3, 3, 3)),
        ("stride", 0),
        ("stride", (1, -1)),
        ("stride", (1, 1, 1)),
        ("padding", -1),
        ("padding", (0, 0, 0)),
        ("padding", "full"),
        ("dilation", 0),
        ("dilation", (1, 1, 1)),
        ("groups", 0),
        ("groups", -2),
        ("groups", 3),
        ("groups", 1),
        ("dtype", torch.int32),
        ("dtype", torch.complex64),
        ("dtype", "float16"),
        ("memory_format", torch.preserve_format),
        ("memory_format", torch.channels_last_3d),
        ("alignment", (32, 32)),
        ("alignment", (32, 32, 24)),
        ("alignment", 32),
        ("input_shape", 5),
        ("input_shape", (1,) * 1_000_000),
        ("stride", None),
        ("groups", None),
        ("groups", (1,)),
        ("dtype", []),
        ("dtype", "x" * 1_000_000),
    ],
)
def test_bad_values_are_named(argument: str, value: Any) -> None:
    ca.ConvProblem(**GOOD)
    with pytest.raises((ValueError, TypeError), match=argument) as raised:
        ca.ConvProblem(**{**GOOD, argument: value})
    assert len(str(raised.value)) < 250


def test_allowed_ops_are_named() -> None:
    with pytest.raises(ValueError, match=r"fprop.*dgrad.*wgrad"):
        ca.ConvProblem(**{**GOOD, "op": "bprop"})


def test_output_channels_must_divide_by_groups() -> None:
    with pytest.raises(ValueError, match=r"weight_shape|groups"):
        ca.ConvProblem(op="fprop", input_shape=(2, 8, 9, 9), weight_shape=(7, 4, 3, 3), groups=2)


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


def test_same_padding_needs_unit_stride() -> None:
    with pytest.raises(ValueError, match=r"padding.*same|same.*stride"):
        ca.ConvProblem(**{**GOOD, "padding": "same", "stride": 2})


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


def test_valid_is_no_padding() -> None:
    assert ca.ConvProblem(**{**GOOD, "padding": "valid"}) == ca.ConvProblem(**GOOD)


def test_even_same_padding_is_asymmetric() -> None:
    problem = ca.ConvProblem(
        op="fprop",
        input_shape=(1, 1, 8, 8),
        weight_shape=(1, 1, 4, 2),
        dilation=(1, 3),
        padding="same",
    )
    assert problem.padding == (1, 1, 2, 2)
    assert problem.output_shape == (1, 1, 8, 8)
    output = F.conv2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 4, 2), None, 1, "same", (1, 3))
    assert tuple(output.shape) == problem.output_shape


def test_problems_are_frozen() -> None:
    problem = ca.ConvProblem(**GOOD)
    with pytest.raises(AttributeError):
        problem.groups = 1  # type: ignore[misc]
