"""The text form of an engine config: what is written is read back; nothing else is read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.candidate_id import CandidateId, canonical, config_of, identify

pytestmark = pytest.mark.search

# Names of the frontend's KnobType_t that convolution engines use.
KNOB_NAMES = (
    "SWIZZLE",
    "TILE_SIZE",
    "EDGE",
    "SPLIT_K_BUF",
    "TILEK",
    "STAGES",
    "REDUCTION_MODE",
    "SPLIT_K_SLC",
    "IDX_MODE",
    "SPECFILT",
    "KERNEL_CFG",
    "WORKSPACE",
    "TILE_CGA_M",
    "TILE_CGA_N",
)

engines = st.integers(0, 10_000)
knob_sets = st.dictionaries(st.sampled_from(KNOB_NAMES), st.integers(0, 2**31), max_size=6)


@given(engines, knob_sets)
def test_round_trip(engine: int, knobs: dict[str, int]) -> None:
    text = ca.expert.engine_text(engine, knobs)
    assert ca.expert.parse_engine_text(text) == (engine, knobs)
    assert ca.expert.engine_text(*ca.expert.parse_engine_text(text)) == text


def test_the_form_is_the_documented_one() -> None:
    assert ca.expert.engine_text(0, {}) == "eng0"
    assert ca.expert.parse_engine_text("eng67:KERNEL_CFG=3,WORKSPACE=0") == (
        67,
        {"KERNEL_CFG": 3, "WORKSPACE": 0},
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eng",
        "67",
        "aten",
        "eng-1",
        "engine67",
        "ENG67",
        " eng67",
        "eng67 ",
        "eng67\n",
        "eng6 7",
        "eng67:",
        "eng67,KERNEL_CFG=3",
        "eng67:KERNEL_CFG",
        "eng67:KERNEL_CFG=",
        "eng67:=3",
        "eng67:KERNEL_CFG=x",
        "eng67:KERNEL_CFG=3,",
        "eng67:,KERNEL_CFG=3",
        "eng67:KERNEL_CFG=3;WORKSPACE=0",
        "eng67:KERNEL_CFG=3,KERNEL_CFG=4",
        "eng67:KERNEL_CFG=3:WORKSPACE=0",
        "eng67:NO_SUCH_KNOB=1",
        "eng99999999999999999999",
        "eng67:KERNEL_CFG=99999999999999999999",
        "eng67:KERNEL_CFG=3\0",
    ],
)
def test_malformed_texts_are_named(text: str) -> None:
    with pytest.raises(ValueError) as error:
        ca.expert.parse_engine_text(text)
    assert text.strip("\0\n ") in str(error.value)


@given(st.text(max_size=30) | st.text("eng0123456789:=,KERNEL_CFGWORKSPA-", max_size=40))
def test_any_text_is_read_exactly_or_refused(text: str) -> None:
    try:
        engine, knobs = ca.expert.parse_engine_text(text)
    except ValueError:
        return
    assert ca.expert.parse_engine_text(ca.expert.engine_text(engine, knobs)) == (engine, knobs)


# The text of a candidate is taken apart in one place, as C++ does it

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


# Knobs by their numbers

NUMBERED = {
    "eng67:KNOB_44=1": "eng67:INPUT_TMA_ENABLE=1",
    "eng67:KNOB_45=0,SWAP_AB=1": "eng67:OUTPUT_TMA_ENABLE=0,SWAP_AB=1",
    # The order is that of the names.
    "unfused:eng3:KERNEL_CFG=2,KNOB_44=1": "unfused:eng3:INPUT_TMA_ENABLE=1,KERNEL_CFG=2",
    "eng3:KNOB_0=2,KNOB_24=1": "eng3:KERNEL_CFG=1,SPLIT_K=2",
    "eng3:KNOB_46=2": "eng3:KNOB_46=2",
    "eng3:KNOB_046=2": "eng3:KNOB_46=2",
    "eng3:KNOB_1000000=2": "eng3:KNOB_1000000=2",
}


@pytest.mark.parametrize("text", NUMBERED)
def test_a_knob_is_read_by_its_number_whether_it_has_a_name_or_not(text: str) -> None:
    expected = NUMBERED[text]
    engine, knobs = ca.expert.parse_engine_text(text)
    written = ca.expert.engine_text(engine, knobs)
    assert expected == ("unfused:" if text.startswith("unfused:") else "") + written
    assert canonical(text) == canonical(expected) == expected
    assert config_of(expected) == (engine, knobs)


def test_every_knob_has_one_text() -> None:
    for number in range(100):
        (name,) = ca.expert.parse_engine_text(f"eng3:KNOB_{number}=1")[1]
        assert ca.expert.parse_engine_text(f"eng3:{name}=1") == (3, {name: 1})
        assert (name == f"KNOB_{number}") is (number > 45)


@pytest.mark.parametrize(
    "text", ["eng3:KNOB_=1", "eng3:KNOB_-1=1", "eng3:KNOB_9999999999=1", "eng3:KNOB_x=1",
             "eng3:KNOB_44=1,INPUT_TMA_ENABLE=1", "eng3:knob_44=1"],
)  # fmt: skip
def test_no_other_number_is_a_knob(text: str) -> None:
    with pytest.raises(ValueError, match=r"knob"):
        ca.expert.parse_engine_text(text)
    assert canonical(text) == text


@pytest.mark.parametrize("text", ["aten", "matmul", "mine@1:KNOB_44", "mine@KNOB_44", "KNOB_44"])
def test_what_names_no_engine_stays(text: str) -> None:
    assert canonical(text) == text


def test_the_engine_of_a_rewrite_is_read_so_too() -> None:
    assert canonical("padded@1:eng67:KNOB_44=1") == "padded@1:eng67:INPUT_TMA_ENABLE=1"


def test_a_pin_by_number_is_one_by_name() -> None:
    problem = ca.ConvProblem("fprop", (1, 8, 8, 8), (8, 8, 3, 3))
    ca.pin(problem, "eng3:KNOB_44=1")
    assert ca.pins() == {problem: "eng3:INPUT_TMA_ENABLE=1"}
