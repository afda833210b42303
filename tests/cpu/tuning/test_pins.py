"""Engines forced upon problems: what needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tuning.strategies import BUILT_IN_MODES

import cudnn_autotune as ca
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.tuning import remembering

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
OTHER = ca.ConvProblem("dgrad", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
POINTWISE: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (2, 8, 9, 9),
    "weight_shape": (4, 8, 1, 1),
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}


def known(problem: ca.ConvProblem, sampling: str = "auto") -> tuple[str, str] | None:
    found = remembering.find(problem, Policy(sampling), 0)
    return found and (found.text, found.origin)


@pytest.mark.parametrize("text", ["eng62:TILE_SIZE=4,WORKSPACE=0", "eng0", "aten"])
def test_a_pin_serves_its_problem_under_every_policy(text: str) -> None:
    ca.pin(PROBLEM, text)
    assert ca.pins() == {PROBLEM: text}
    for sampling in BUILT_IN_MODES:
        assert known(PROBLEM, sampling) == (text, "pinned")
    found = remembering.find(PROBLEM, Policy("auto", 0, 5), 3)
    assert (found.text, found.origin, found.device) == (text, "pinned", 3)
    assert (found.total_samples, found.time_ms, found.provenance) == (0, None, None)
    assert known(OTHER) is None


def test_the_last_pin_stands_and_unpin_ends_it() -> None:
    ca.pin(PROBLEM, "eng1")
    ca.pin(PROBLEM, "eng2")
    ca.pin(OTHER, "aten")
    assert known(PROBLEM) == ("eng2", "pinned")
    ca.unpin(PROBLEM)
    assert known(PROBLEM) is None
    assert ca.pins() == {OTHER: "aten"}
    ca.unpin()
    assert ca.pins() == {}


def test_forgetting_leaves_pins_alone() -> None:
    ca.pin(PROBLEM, "eng1")
    ca.forget()
    assert known(PROBLEM) == ("eng1", "pinned")


def test_a_matrix_product_is_for_what_is_one() -> None:
    pointwise = ca.ConvProblem(**POINTWISE)
    ca.pin(pointwise, "matmul")
    assert known(pointwise) == ("matmul", "pinned")
    for changes in (
        {"weight_shape": (4, 8, 3, 3)},
        {"stride": 2},
        {"dtype": torch.float32},
        {"memory_format": torch.contiguous_format},
        {"deterministic": True},
    ):
        with pytest.raises(ValueError, match="engine_text: 'matmul'"):
            ca.pin(ca.ConvProblem(**{**POINTWISE, **changes}), "matmul")


def test_unpinning_what_is_not_pinned_is_an_error() -> None:
    with pytest.raises(KeyError, match="not pinned"):
        ca.unpin(PROBLEM)
    ca.unpin()
