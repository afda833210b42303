"""Which remembered problems are like a new one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from nearest_problems import nearest

import cudnn_autotune as ca
from cudnn_autotune.store.decision import Policy, key_of

BASE: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (32, 64, 56, 56),
    "weight_shape": (128, 64, 3, 3),
    "padding": 1,
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}


def problem(**changes: Any) -> ca.ConvProblem:
    return ca.ConvProblem(**{**BASE, **changes})


def key(sampling: str = "auto", **changes: Any) -> str:
    return key_of(problem(**changes), Policy(sampling))


def test_the_nearest_comes_first() -> None:
    keys = [key(input_shape=(n, 64, 56, 56)) for n in (4, 16, 40, 128, 64)]
    found = nearest(problem(), keys)
    assert found == [
        key(input_shape=(40, 64, 56, 56)),
        key(input_shape=(16, 64, 56, 56)),
        key(input_shape=(64, 64, 56, 56)),
    ]


def test_every_size_counts() -> None:
    near = key(input_shape=(32, 64, 56, 48))
    channels_in = key(input_shape=(32, 128, 56, 56), weight_shape=(128, 128, 3, 3))
    channels_out = key(weight_shape=(384, 64, 3, 3))
    far = key(input_shape=(32, 64, 14, 14))
    assert nearest(problem(), [far, channels_out, channels_in, near], most=9) == [
        near,
        channels_in,
        channels_out,
        far,
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "dgrad"},
        {"op": "wgrad"},
        {"dtype": torch.bfloat16},
        {"memory_format": torch.contiguous_format},
        {"weight_shape": (128, 64, 5, 5)},
        {"stride": 2},
        {"dilation": 2},
        {"weight_shape": (128, 32, 3, 3), "groups": 2},
        {"input_shape": (32, 64, 8, 56, 56), "weight_shape": (128, 64, 3, 3, 3),
         "memory_format": torch.channels_last_3d},
        {"allow_reduced_precision": False},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_kind_is_no_neighbour(changes: dict[str, Any]) -> None:
    other = {"input_shape": (16, 64, 56, 56), **changes}
    assert nearest(problem(), [key(**other)]) == []


def test_depthwise_ones_are_alike() -> None:
    wide = problem(input_shape=(32, 96, 56, 56), weight_shape=(96, 1, 3, 3), groups=96)
    narrow = key(weight_shape=(64, 1, 3, 3), groups=64)
    assert nearest(wide, [narrow]) == [narrow]


def test_its_own_key_and_what_is_too_far_are_left_out() -> None:
    assert nearest(problem(), [key(), key("race")]) == []
    assert nearest(problem(), [key(input_shape=(1024, 64, 56, 56))]) == []


def test_of_whatever_mode() -> None:
    keys = [key("race", input_shape=(16, 64, 56, 56)), key("auto", input_shape=(8, 64, 56, 56))]
    assert nearest(problem(), keys) == keys


def test_padding_may_differ() -> None:
    other = key(input_shape=(16, 64, 56, 56), padding=0)
    assert nearest(problem(), [other]) == [other]


def test_foreign_keys_do_no_harm() -> None:
    assert nearest(problem(), ["", "fprop", "fprop x=1 w=2 nonsense", "\x00", "fprop x= w="]) == []


@pytest.mark.parametrize(
    "sizes",
    ["16x64x5xx56", "16x64x00x56", "16x64x56_56", "16x64x56", "16x64x56x56x56", "16x64x-5x56",
     "16x64x٤x56", "16x64x 56x56", "x".join(["16", "64", "56", "9" * 5000])],
)  # fmt: skip
def test_a_damaged_name_is_passed_over(sizes: str) -> None:
    near = key(input_shape=(16, 64, 56, 56))
    for what in ("x=16x64x56x56", "w=128x64x3x3"):
        damaged = near.replace(what, f"{what[:2]}{sizes}")
        assert damaged != near
        assert nearest(problem(), [damaged, near]) == [near]
    many = near.replace("groups=1", f"groups={'9' * 5000}")
    assert nearest(problem(), [many, near]) == [near]


def test_the_order_of_the_keys_does_not_matter() -> None:
    keys = [key(input_shape=(n, 64, s, s)) for n in (8, 16, 64) for s in (28, 48, 64)]
    expected = nearest(problem(), keys, most=9)
    for seed in range(10):
        shuffled = random.Random(seed).sample(keys, len(keys))
        assert nearest(problem(), shuffled, most=9) == expected
