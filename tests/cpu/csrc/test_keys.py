"""Every field of a problem counts in its key: in Python, in its text and in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.conv.problem_fields import BASE, CHANGES

import cudnn_autotune as ca
from cudnn_autotune import _C

pytestmark = pytest.mark.search


def problems() -> list[ca.ConvProblem]:
    return [ca.ConvProblem(**BASE)] + [ca.ConvProblem(**{**BASE, **c}) for c in CHANGES]


def test_the_list_above_names_every_field() -> None:
    """A field added to ConvProblem must be added here."""
    fields = set(ca.ConvProblem.__dataclass_fields__)
    assert fields == set(BASE)
    assert {name for change in CHANGES for name in change} == fields


def test_no_two_problems_share_text_or_hash() -> None:
    found = problems()
    assert len({p.text for p in found}) == len(found)
    assert len({hash(p) for p in found}) == len(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("allow_tf32", torch.float16), ("allow_reduced_precision", torch.float32)],
    ids=str,
)
def test_a_flag_that_says_nothing_is_not_part_of_the_key(flag: str, dtype: torch.dtype) -> None:
    """TF32 exists for float32 only, partial sums in 16 bits for the 16-bit types only."""
    without = ca.ConvProblem(**{**BASE, "dtype": dtype, flag: False})
    assert without == ca.ConvProblem(**{**BASE, "dtype": dtype})


@pytest.mark.parametrize(
    "reached",
    [
        {},  # not depthwise
        {"groups": 4, "weight_shape": (8, 2, 3, 3)},
        {"groups": 8, "weight_shape": (8, 1, 3, 3), "memory_format": torch.channels_last},
        {"input_shape": (2, 1, 10, 12), "weight_shape": (8, 1, 3, 3)},
    ],
    ids=str,
)
def test_the_depthwise_kernel_is_of_the_key_only_where_the_setting_reaches(
    reached: dict[str, Any],
) -> None:
    without = ca.ConvProblem(**{**BASE, **reached, "depthwise_kernel": "native"})
    assert without == ca.ConvProblem(**{**BASE, **reached})


@pytest.mark.search
def test_calls_read_pytorchs_depthwise_kernel() -> None:
    if not hasattr(torch._C, "_get_cudnn_depthwise_kernel"):
        assert _C.depthwise_kernel() == "auto"
        return
    for kernel in ("cudnn", "native", "auto"):
        torch._C._set_cudnn_depthwise_kernel(kernel)
        try:
            assert _C.depthwise_kernel() == kernel
        finally:
            torch._C._set_cudnn_depthwise_kernel("auto")


@pytest.mark.search
def test_no_two_problems_share_a_native_key() -> None:
    keys = [_C.problem_key(p.native()) for p in problems()]
    assert all(isinstance(key, bytes) and key for key in keys)
    assert len(set(keys)) == len(keys)


@pytest.mark.search
def test_native_keys_do_not_depend_on_the_object() -> None:
    """Padding bytes of a C struct would make equal problems differ, now and then."""
    for _ in range(50):
        first, again = problems(), problems()
        for one, other in zip(first, again, strict=True):
            assert _C.problem_key(one.native()) == _C.problem_key(other.native())
