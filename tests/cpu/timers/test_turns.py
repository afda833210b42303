"""The loop of turns that races, recordings and audits share."""

from __future__ import annotations

import random

import pytest
from support.simulation import candidate, engine, timer_of

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.turns import Mirrored, Turns

FOUR = [candidate(f"c{i}", i) for i in range(4)]


def texts(order: list[Candidate]) -> list[str]:
    return [c.text for c in order]


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_each_order_is_followed_by_its_mirror_image(repeats: int) -> None:
    rng = random.Random(3)
    schedule = Mirrored(lambda some: rng.sample(some, len(some)), repeats)
    orders = [texts(schedule.next_order(FOUR)) for _ in range(4 * repeats)]
    for start in (0, 2 * repeats):
        first = orders[start]
        assert orders[start : start + repeats] == [first] * repeats
        assert orders[start + repeats : start + 2 * repeats] == [first[::-1]] * repeats
    assert orders[0] != orders[2 * repeats]


def test_a_linear_drift_affects_all_alike() -> None:
    schedule = Mirrored.seeded(5)
    places = dict.fromkeys(texts(FOUR), 0)
    for _ in range(10):
        for place, one in enumerate(schedule.next_order(FOUR)):
            places[one.text] += place
    assert set(places.values()) == {15}


def test_who_has_left_has_no_turn_and_the_others_keep_their_order() -> None:
    schedule = Mirrored.seeded(1)
    order = schedule.next_order(FOUR)
    left = [c for c in FOUR if c is not order[1]]
    assert schedule.next_order(left) == [order[3], order[2], order[0]]


def test_a_seed_determines_the_orders() -> None:
    one, other = Mirrored.seeded(7), Mirrored.seeded(7)
    for _ in range(6):
        assert one.next_order(FOUR) == other.next_order(FOUR)


def test_a_failure_is_recorded_and_ends_the_turns_of_a_candidate() -> None:
    broken, sound = (
        engine("broken", 1.0, error="CUDNN_STATUS_EXECUTION_FAILED"),
        engine("sound", 1.0),
    )
    timer = timer_of(broken, sound)
    turns = Turns(timer, 0)
    both = [broken.candidate, sound.candidate]
    assert turns.once(broken.candidate) is None
    assert turns.failed == {"broken": "CUDNN_STATUS_EXECUTION_FAILED"}
    assert turns.next_order(both) == [sound.candidate]
    turns.rough_ms["sound"] = 1.0
    assert set(turns.round(turns.next_order(both), "hot", 3.0)) == {"sound"}


def test_a_batch_takes_about_the_time_asked_for_within_the_most_calls() -> None:
    turns = Turns(timer_of(engine("c0", 1.0)), 0, {"c0": 0.3}, most_calls=5)
    assert [turns.calls(FOUR[0], ms) for ms in (0.1, 0.3, 0.4, 9.0)] == [1, 1, 2, 5]
