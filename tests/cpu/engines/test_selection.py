"""What a strategy hands back: it round-trips through plain JSON; ties are broken by fixed rules."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulation import candidate

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties


def stored(selection: Selection) -> Any:
    """What a file gives back."""
    return json.loads(json.dumps(selection.to_json(), allow_nan=False))


# Round trips


texts = st.text(max_size=12)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(0, 1e15, allow_nan=False)
maybe = st.none() | numbers
candidates = st.builds(
    Candidate,
    engine=st.none() | st.integers(0, 500),
    knobs=st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1), max_size=4),
    workspace_bytes=counts,
    numerical_notes=st.lists(texts, max_size=3).map(tuple),
    behavior_notes=st.lists(texts, max_size=3).map(tuple),
    text=texts,
    heuristic_mode=st.sampled_from(["", "A", "B", "FALLBACK"]),
    rank=st.integers(0, 2**31 - 1),
)
timed = st.builds(
    Measurement,
    candidate=candidates,
    time_ms=maybe,
    samples=counts,
    low_ms=maybe,
    high_ms=maybe,
    sustained_ms=maybe,
    eliminated=texts,
)
many_texts = st.lists(texts, max_size=3).map(tuple)
evidences = st.builds(
    Evidence,
    rule=texts,
    tied=many_texts,
    regret_bound=maybe,
    confidence=maybe,
    gpu_ms=numbers,
    wall_ms=numbers,
    clock_mhz=maybe,
    sustained_clock_mhz=maybe,
    max_clock_mhz=maybe,
    throttle_reasons=many_texts,
    disturbed=counts,
    remarks=many_texts,
)
selections = st.builds(
    Selection,
    ranking=st.lists(timed, min_size=1, max_size=4).map(tuple),
    total_samples=counts,
    evidence=evidences,
)


@given(selection=selections)
def test_any_selection_round_trips(selection: Selection) -> None:
    assert Selection.from_json(stored(selection)) == selection


def simple(time_ms: float | None = 1.0, **changes: Any) -> Selection:
    entry = Measurement(candidate("a"), time_ms, 3)
    return replace(Selection((entry, Measurement(OWN_PATH, 2.0, 1)), 4), **changes)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_hold_is_null(value: float) -> None:
    evidence = Evidence(regret_bound=value, clock_mhz=value)
    tree = stored(simple(time_ms=value, evidence=evidence))
    assert tree["ranking"][0]["time_ms"] is None
    assert tree["evidence"]["regret_bound"] is None
    back = Selection.from_json(tree)
    assert back.winner.time_ms is None
    assert back.evidence.regret_bound is None
    assert back.ranking[1].time_ms == 2.0


def test_what_equals_its_default_is_left_out() -> None:
    tree = stored(simple())
    assert "evidence" not in tree
    assert set(tree["ranking"][0]) == {"candidate", "time_ms", "samples"}
    assert Selection.from_json(tree) == simple()


# Malformed trees

MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no ranking": lambda tree: tree.pop("ranking"),
    "ranking of texts": lambda tree: tree.update(ranking=["a"]),
    "ranking that is an object": lambda tree: tree.update(ranking={"a": 1}),
    "no total_samples": lambda tree: tree.pop("total_samples"),
    "total_samples infinite": lambda tree: tree.update(total_samples=math.inf),
    "total_samples a text": lambda tree: tree.update(total_samples="4"),
    "an unknown field": lambda tree: tree.update(winner="a"),
    "evidence a list": lambda tree: tree.update(evidence=[]),
    "unknown evidence": lambda tree: tree.update(evidence={"luck": 1}),
    "tied a text": lambda tree: tree.update(evidence={"tied": "abc"}),
    "tied of numbers": lambda tree: tree.update(evidence={"tied": [1]}),
    "gpu_ms null": lambda tree: tree.update(evidence={"gpu_ms": None}),
    "wall_ms NaN": lambda tree: tree.update(evidence={"wall_ms": math.nan}),
    "no candidate": lambda tree: tree["ranking"][0].pop("candidate"),
    "candidate null": lambda tree: tree["ranking"][0].update(candidate=None),
    "time_ms a text": lambda tree: tree["ranking"][0].update(time_ms="fast"),
    "time_ms negative": lambda tree: tree["ranking"][0].update(time_ms=-1.0),
    "time_ms NaN": lambda tree: tree["ranking"][0].update(time_ms=math.nan),
    "samples true": lambda tree: tree["ranking"][0].update(samples=True),
    "no text": lambda tree: tree["ranking"][0]["candidate"].pop("text"),
    "no knobs": lambda tree: tree["ranking"][0]["candidate"].pop("knobs"),
    "knobs a list": lambda tree: tree["ranking"][0]["candidate"].update(knobs=[["K", 1]]),
    "a knob that is a text": lambda tree: tree["ranking"][0]["candidate"].update(knobs={"K": "1"}),
    "notes a text": lambda tree: tree["ranking"][0]["candidate"].update(numerical_notes="abc"),
    "engine a text": lambda tree: tree["ranking"][0]["candidate"].update(engine="67"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_trees_are_refused(what: str) -> None:
    tree = stored(simple())
    MALFORMED[what](tree)
    with pytest.raises(ValueError, match="selection"):
        Selection.from_json(tree)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = [path] if path else []
    for key, value in inner:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


SPOILT = stored(simple(evidence=Evidence("a", ("a",), 0.5, 2.0, 0.01, 0.95, remarks=("b",))))


@given(value=values, data=st.data())
def test_whatever_is_wrong_is_a_value_error(value: Any, data: st.DataObject) -> None:
    """Or it is a selection after all, and then that round-trips."""
    tree = copy.deepcopy(SPOILT)
    *path, last = data.draw(st.sampled_from(places(tree)))
    at = tree
    for key in path:
        at = at[key]
    at[last] = value
    try:
        selection = Selection.from_json(tree)
    except ValueError:
        return
    assert Selection.from_json(stored(selection)) == selection


# Ties


def config(text: str, **changes: Any) -> Candidate:
    return replace(candidate(text), **{"engine": 1, "rank": 5, "workspace_bytes": 8, **changes})


BASE = config("m")
# Each rule with a candidate that loses to BASE by it alone, though it would win by all later rules.
# Times do not count.
RULES = {
    "deterministic": config("a", numerical_notes=("NONDETERMINISTIC",), rank=0, workspace_bytes=0),
    "an engine of cuDNN": config("b", engine=None, rank=0, workspace_bytes=0),
    "one kernel": config("unfused:b", rank=0, workspace_bytes=0),
    "less workspace": config("c", workspace_bytes=9, rank=0),
    "earlier in cuDNN's list": config("e", rank=6),
    "the first by name": config("n"),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("time", [0.991, 1.0, 1.009])
def test_each_rule_decides(name: str, time: float) -> None:
    other = RULES[name]
    for times in ({BASE: 1.0, other: time}, {other: time, BASE: 1.0}):
        assert ties.break_ties(times) == ([BASE, other], f"tie: {name}")


def test_the_rules_are_asked_in_their_order() -> None:
    names = list(RULES)
    for count in range(1, len(names) + 1):
        # The last rule that is needed is the one that decided.
        order, rule = ties.break_ties(
            {BASE: 1.0, **dict.fromkeys(map(RULES.get, names[:count]), 1.0)}
        )
        assert order[0] is BASE
        assert rule == f"tie: {names[count - 1]}"
    # A candidate that loses by an earlier rule ranks behind one that loses by a later one.
    order, _ = ties.break_ties({BASE: 1.0, **dict.fromkeys(RULES.values(), 1.0)})
    assert order == [BASE, *reversed(RULES.values())]


@pytest.mark.parametrize("own", [OWN_PATH, config("e", rank=6, workspace_bytes=99)])
def test_of_equals_what_pytorch_would_run_is_taken(own: Candidate) -> None:
    for time in (0.991, 1.0, 1.009):
        assert ties.break_ties({BASE: time, own: 1.0}, own.text) == (
            [own, BASE],
            "tie: PyTorch's choice",
        )


def test_nothing_slower_than_what_pytorch_would_run_is_taken() -> None:
    """A deterministic one is, if it is as fast."""
    own = RULES["deterministic"]
    assert ties.break_ties({BASE: 1.0, own: 1.0}, own.text) == ([BASE, own], "tie: deterministic")
    assert ties.break_ties({BASE: 1.001, own: 1.0}, own.text)[0] == [own, BASE]
    third = config("c", workspace_bytes=0)
    order, rule = ties.break_ties({third: 1.001, BASE: 1.0, own: 1.0}, own.text)
    assert order == [BASE, own, third]
    assert rule == "tie: deterministic"


def test_noise_widens_a_tie_up_to_a_limit() -> None:
    assert ties.width(0.0) == ties.TIE_WIDTH
    assert ties.TIE_WIDTH < ties.width(0.002) < ties.width(0.004) < ties.WIDEST
    assert ties.width(1.0) == ties.WIDEST


def test_the_earlier_mode_comes_first_however_ranks_are_counted() -> None:
    """A search asks mode by mode, and each mode's ranks start at 0."""
    tied = [
        config("last", heuristic_mode="", rank=1),
        config("fallback", heuristic_mode="FALLBACK", rank=0),
        config("b", heuristic_mode="B", rank=0),
        config("a", heuristic_mode="A", rank=3),
    ]
    order, rule = ties.break_ties(dict.fromkeys(tied, 1.0))
    assert [c.text for c in order] == ["a", "b", "fallback", "last"]
    assert rule == "tie: earlier in cuDNN's list"


@given(
    found=st.lists(
        st.tuples(candidates, st.sampled_from([1.0, 1.001, 1.002, 1.003, 1.005])),
        min_size=1,
        max_size=6,
        unique_by=lambda pair: pair[0].text,
    ),
    seed=st.integers(0, 100),
)
def test_the_order_is_total_and_does_not_depend_on_the_input(
    found: list[tuple[Candidate, float]], seed: int
) -> None:
    shuffled = random.Random(seed).sample(found, len(found))
    assert ties.break_ties(dict(shuffled)) == ties.break_ties(dict(found))
    assert set(ties.break_ties(dict(found))[0]) == set(dict(found))
