"""A store finds the nearest problems by an index, which finds what comparing with all would."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.store.decisions import H200, decision
from support.store.nearest import nearest

import cudnn_autotune as ca
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import codec, file_format, neighbours
from cudnn_autotune.store.decision import key_of
from cudnn_autotune.store.file_store import Layered, Store
from cudnn_autotune.store.neighbours import Neighbours


def layer(rng: random.Random, few: bool = False) -> ca.ConvProblem:
    """Returns a layer of one of a few kinds; with ``few``, of one kind and in one size only."""
    kernel = 3 if few else rng.choice([1, 3])
    channels = 64 if few else rng.choice([16, 32, 64, 96, 128])
    size = rng.randint(8, 5000) if few else rng.choice([7, 14, 28, 56, 60, 112])
    return ca.ConvProblem(
        "fprop" if few else rng.choice(["fprop", "dgrad"]),
        (1, channels, size, 8 if few else rng.choice([size, 2 * size])),
        (64 if few else rng.choice([32, 64, 128]), channels, kernel, kernel),
        padding=rng.choice([0, kernel // 2]),
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


def by_comparing(problem: ca.ConvProblem, keys: Iterable[str], most: int) -> list[str]:
    """What the definition says: the distance to each key."""
    own = neighbours._described(problem.text)
    assert own is not None
    found = []
    for key in keys:
        described = neighbours._described(codec.problem_of(key))
        if described is not None and described[0] == own[0] and described[1] != own[1]:
            distance = math.dist(own[1], described[1])
            if distance <= 3.0 + 1e-9:
                found.append((round(distance, 9), key))
    return [key for _, key in sorted(found)[:most]]


@pytest.mark.basic(2)
@pytest.mark.parametrize("few", [False, True], ids=["many kinds", "one kind"])
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_comparing_finds(few: bool, seed: int) -> None:
    rng = random.Random(seed)
    problems = [layer(rng, few) for _ in range(600)]
    keys = list(dict.fromkeys(key_of(p, Policy(rng.choice(["auto", "race"]))) for p in problems))
    index = Neighbours()
    place = 0
    for step in range(1, 13):
        index.add(keys[: step * 60])  # what was added before is passed over
        gone = set(rng.sample(keys, 40)) if step % 2 else set()
        for asked in rng.sample(problems, 10):
            most = rng.choice([1, 3, 10])
            there = [key for key in keys[: step * 60] if key not in gone]
            found = index.nearest(asked, most, lambda key: key not in gone)  # noqa: B023
            assert [key for _, key in found] == by_comparing(asked, there, most)
            place += bool(found)
    assert place > 60
    for asked in problems[:20]:
        assert nearest(asked, keys) == by_comparing(asked, keys, 3)


def test_a_search_asks_for_few() -> None:
    """The number of keys that are looked up, as the time depends on the machine."""
    rng = random.Random(0)
    keys = [key_of(layer(rng, few=True)) for _ in range(4000)]
    index = Neighbours()
    index.add(keys)
    asked: list[str] = []

    def is_there(key: str) -> bool:
        asked.append(key)
        return True

    for number in range(50):
        assert len(index.nearest(layer(rng, few=True), 3, is_there)) == 3
        assert len(asked) < 100 * (number + 1)


def near(store: Store, size: int) -> list[int]:
    """The sizes of the nearest problems; ``decision(n)`` has the size n."""
    found = store.nearest(decision(size).problem)
    assert found == sorted(found)
    return [int(key.split("x=1x1x")[1].split("x")[0]) for _, key in found]


def test_a_store_follows_changes_of_its_own_and_of_others(tmp_path: Path) -> None:
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)
    assert near(store, 100) == []
    store.add([decision(n) for n in (90, 101, 200)])
    assert near(store, 100) == [101, 90, 200]
    other.add([decision(99)])
    assert near(store, 100) == [101, 99, 90]
    store.discard([decision(101)])
    assert near(store, 100) == [99, 90, 200]
    other.add([decision(101), decision(102)])  # one is new, one comes back
    store.discard([decision(90)])
    assert near(store, 100) == [101, 99, 102] == near(other, 100)
    other.discard([decision(99)])
    other.add([decision(98), decision(99)])
    assert near(store, 100) == [101, 99, 102]
    other.discard([decision(102), decision(99)])
    assert near(store, 100) == [101, 98, 200]


def test_a_store_follows_a_file_that_was_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(n) for n in (90, 101, 200)])
    assert near(store, 100) == [101, 90, 200]
    lines = [codec.encode(decision(n), H200) for n in (110, 95)]
    store.path.write_bytes(file_format.encode(H200, lines))
    assert near(store, 100) == [95, 110]


def test_layers_are_asked_together(tmp_path: Path) -> None:
    user, shipped = Store(tmp_path / "a", H200), Store(tmp_path / "b", H200)
    user.add([decision(101), decision(400)])
    shipped.add([decision(101), decision(99), decision(90)])
    found = Layered(user, [shipped]).nearest(decision(100).problem)
    assert found == [decision(n).key for n in (101, 99, 90)]


# Which remembered problems are like a new one

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


def test_the_order_of_the_keys_does_not_matter() -> None:
    keys = [key(input_shape=(n, 64, s, s)) for n in (8, 16, 64) for s in (28, 48, 64)]
    expected = nearest(problem(), keys, most=9)
    for seed in range(10):
        shuffled = random.Random(seed).sample(keys, len(keys))
        assert nearest(problem(), shuffled, most=9) == expected
