"""Programs take turns on the same inputs, and a wrong one is named."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from cudnn_autotune.nn.models.comparison import compare, difference


def test_the_faster_program_is_found() -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x + 1

    found = compare({"slow": slow, "fast": lambda x: x + 1}, [torch.ones(3)])
    assert found.fastest == "fast"
    assert found.times_ms["slow"] > 2
    assert not found.wrong


def test_a_wrong_program_is_named_and_not_timed() -> None:
    programs = {"reference": lambda x: (x, 1), "wrong": lambda x: (x * 1.1, 1)}
    found = compare(programs, [torch.ones(3)])
    assert list(found.times_ms) == ["reference"]
    assert "output 0 has a relative error of 0.1" in found.wrong["wrong"]


def test_random_programs_draw_the_same_numbers() -> None:
    state = torch.get_rng_state()
    programs = {"one": lambda x: x + torch.rand(3), "other": lambda x: torch.rand(3) + x}
    assert not compare(programs, [torch.ones(3)]).wrong
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ([torch.ones(2)], None),
        ([torch.ones(2) + 1e-4], None),
        ([torch.ones(2) + 0.1], "relative error"),
        ([torch.tensor([1.0, float("nan")])], "not finite"),
        ([torch.ones(2, dtype=torch.float16)], "torch.float16"),
        ([torch.ones(3)], r"\(3,\)"),
        ([], "0 outputs"),
    ],
)
def test_differences_of_outputs(other: list[Tensor], text: str | None) -> None:
    found = difference([torch.ones(2)], other)
    if text is None:
        assert found is None
    else:
        assert found is not None
        assert text.replace("\\", "") in found


def test_infinities_in_the_same_places_are_no_difference() -> None:
    tensor = torch.tensor([1.0, float("inf")])
    assert difference([tensor], [tensor.clone()]) is None


def test_integers_are_not_compared_by_value() -> None:
    """The index of the largest of values that are nearly equal may be another one."""
    assert difference([torch.tensor([1, 2])], [torch.tensor([2, 1])]) is None
