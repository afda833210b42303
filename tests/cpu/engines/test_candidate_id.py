"""The text of a candidate is taken apart in one place, as C++ does it."""

from __future__ import annotations

import random

import pytest

from cudnn_autotune import _C
from cudnn_autotune.engines.candidate_id import CandidateId, config_of, identify

PARTS = (
    "eng",
    "3",
    "unfused:",
    "aten",
    "matmul",
    "depthwise",
    "@",
    "1",
    ":",
    "K=2",
    ",",
    "é",
    "\0",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten", CandidateId("aten", "aten")),
        ("matmul", CandidateId("matmul", "matmul")),
        ("eng3", CandidateId("engine", "eng3")),
        ("eng3:K=2,L=-1", CandidateId("engine", "eng3", "", "K=2,L=-1")),
        ("unfused:eng3:K=2", CandidateId("unfused", "eng3", "", "K=2")),
        ("mine@1.0", CandidateId("implementation", "mine", "1.0")),
        ("padded@1:eng67:A=3", CandidateId("implementation", "padded", "1", "eng67:A=3")),
    ],
)
def test_a_text_and_its_parts_lead_to_each_other(text: str, expected: CandidateId) -> None:
    assert identify(text) == expected
    assert expected.text == text


def test_any_text_is_of_a_kind_which_is_that_of_cpp() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 5)))
        found = identify(text)
        assert found.is_engine == _C.is_engine(text)
        assert found.is_engine + found.is_implementation + found.is_own_path == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eng3", (3, {})),
        ("unfused:eng3:K=2,L=-1", (3, {"K": 2, "L": -1})),
        ("eng3:", (None, {})),
        ("eng٣", (None, {})),
        ("eng" + "9" * 19, (None, {})),
        ("unfused:unfused:eng3", (None, {})),
        ("mine@1:eng3", (None, {})),
        ("aten", (None, {})),
    ],
)
def test_a_text_names_an_engine_and_its_knobs(
    text: str, expected: tuple[int | None, dict[str, int]]
) -> None:
    assert config_of(text) == expected
