"""Who hears of decisions."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune import events
from cudnn_autotune.choice_log import Choice
from cudnn_autotune.engines import ATEN
from cudnn_autotune.sampling.selection import Timed

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
CHOICE = Choice(PROBLEM, 0, "race", None, 0, "aten", Timed(ATEN, 0.25, 3), 12.0, None, None, ())


def test_a_callback_hears_of_every_decision_until_it_is_removed() -> None:
    heard: list[Choice] = []
    handle = ca.on_decision(heard.append)
    pinned = dataclasses.replace(CHOICE, origin="pinned")
    events.tell(CHOICE)
    events.tell(pinned)
    handle.remove()
    events.tell(CHOICE)
    assert heard == [CHOICE, pinned]


def test_the_handle_is_a_context_manager() -> None:
    heard: list[Choice] = []
    with ca.on_decision(heard.append):
        events.tell(CHOICE)
    events.tell(CHOICE)
    assert heard == [CHOICE]


def test_callbacks_are_called_in_their_order() -> None:
    heard: list[int] = []
    with ca.on_decision(lambda _: heard.append(1)), ca.on_decision(lambda _: heard.append(2)):
        events.tell(CHOICE)
    assert heard == [1, 2]


def test_one_that_fails_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Choice] = []

    def fails(choice: Choice) -> None:
        raise RuntimeError("mine")

    with ca.on_decision(fails), ca.on_decision(heard.append):
        events.tell(CHOICE)
    assert heard == [CHOICE]
    assert "mine" in caplog.text


def test_a_callback_may_remove_itself() -> None:
    heard: list[Choice] = []

    def once(choice: Choice) -> None:
        heard.append(choice)
        handle.remove()

    handle = ca.on_decision(once)
    events.tell(CHOICE)
    events.tell(CHOICE)
    assert heard == [CHOICE]


def test_every_decision_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cudnn_autotune"):
        events.tell(dataclasses.replace(CHOICE, origin="store"))
    (record,) = caplog.records
    assert record.name == "cudnn_autotune"
    assert record.levelno == logging.INFO
    for part in (PROBLEM.text, "aten", "race", "store", "0.25 ms"):
        assert part in record.getMessage()


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="callback must be callable, got 3"):
        ca.on_decision(3)  # type: ignore[arg-type]
