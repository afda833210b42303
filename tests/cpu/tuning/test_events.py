"""Who hears of decisions."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import events, miss
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.events import SlowSearches

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
DECISION = Decision(PROBLEM, Policy("race"), Selection((Measurement(OWN_PATH, 0.25, 3),), 3))
CHOICE = Choice(DECISION, device=0, tuning_ms=12.0)


def test_callbacks_hear_of_every_decision_in_their_order_until_they_are_removed() -> None:
    heard: list[tuple[int, Choice]] = []
    pinned = dataclasses.replace(CHOICE, origin="pinned")
    first = ca.on_decision(lambda choice: heard.append((1, choice)))
    with ca.on_decision(lambda choice: heard.append((2, choice))):
        events.announce(CHOICE)
    events.announce(pinned)
    first.remove()
    events.announce(CHOICE)
    assert heard == [(1, CHOICE), (2, CHOICE), (1, pinned)]


def test_one_that_fails_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Choice] = []

    def fails(choice: Choice) -> None:
        raise RuntimeError("mine")

    with ca.on_decision(fails), ca.on_decision(heard.append):
        events.announce(CHOICE)
    assert heard == [CHOICE]
    assert "mine" in caplog.text


def test_it_is_called_once_other_threads_may_tune() -> None:
    """C++ calls what the handler returns after it has unlocked the mutex."""
    ca.pin(PROBLEM, "aten")
    heard: list[Choice] = []
    with ca.on_decision(heard.append):
        *_, afterwards = miss.choose(PROBLEM.native(), "race", -1, 0, 0, *operands(PROBLEM, "cpu"))
        assert heard == []
        assert [choice.text for choice in ca.choices()] == ["aten"]
        afterwards()
    assert heard == ca.choices()


def test_a_callback_may_remove_itself() -> None:
    heard: list[Choice] = []

    def once(choice: Choice) -> None:
        heard.append(choice)
        handle.remove()

    handle = ca.on_decision(once)
    events.announce(CHOICE)
    events.announce(CHOICE)
    assert heard == [CHOICE]


def test_every_decision_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cudnn_autotune"):
        events.announce(dataclasses.replace(CHOICE, origin="store"))
    (record,) = caplog.records
    assert record.name == "cudnn_autotune"
    assert record.levelno == logging.INFO
    for part in (PROBLEM.text, "aten", "race", "store", "0.25 ms"):
        assert part in record.getMessage()


class Said(logging.Handler):
    """What the package's log says, as soon as it does."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.is_there = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {record.levelname}: {record.getMessage()}")
        self.is_there.set()


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    log = logging.getLogger("cudnn_autotune")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_long_search_is_told_of_while_it_runs(said: Said) -> None:
    searches = SlowSearches(after_s=0.05)
    with searches.searching():
        assert said.is_there.wait(30)
    (line,) = said.lines
    assert line.startswith("cudnn_autotune WARNING: ")
    advice = "cudnn_autotune.tune(model, ...), or cudnn-autotune tune."
    ready = "0 convolutions are ready."
    for part in ("0.05 s", ready, "online", "set_budget_ms", "heuristic", advice):
        assert part in line
    said.is_there.clear()
    with searches.searching():
        assert not said.is_there.wait(0.2), "once is enough"
