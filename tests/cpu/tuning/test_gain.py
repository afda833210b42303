"""Choices, tunings of models, conversions and compilations describe themselves in one line."""

from __future__ import annotations

import copy
import pickle
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.store.decisions import decision, problem, selection, timed

import cudnn_autotune as ca
from cudnn_autotune.engines.selection import Evidence, Measurement
from cudnn_autotune.models.tune import Tuned
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import choice_log
from cudnn_autotune.tuning.choice import Choice

FAST, SLOW = timed("eng1", 2.0), timed("aten", 3.0)


def decided(*ranking: Measurement, **changes: object) -> Decision:
    return decision(selection=selection(ranking, Evidence(rule="fastest")), **changes)


def choice(*ranking: Measurement) -> Choice:
    return Choice(decided(*ranking), device=0)


def test_a_choice_knows_pytorchs_time_and_the_ratio() -> None:
    made = choice(FAST, SLOW)
    assert (made.pytorch_ms, made.speedup) == (3.0, 1.5)
    assert ": eng1, 2.000 ms, speedup 1.50x, tuned, auto)" in repr(made)
    # Runs alone at a steady clock are compared with one another.
    alone = choice(replace(FAST, sustained_ms=2.2), replace(SLOW, sustained_ms=4.4))
    assert (alone.pytorch_ms, alone.speedup) == (3.0, 2.0)


def test_pytorchs_own_path_is_no_gain() -> None:
    own = choice(SLOW, replace(FAST, time_ms=4.0))
    assert (own.pytorch_ms, own.speedup) == (3.0, 1.0)
    assert "speedup 1.00x: PyTorch would run the same" in repr(own)
    # PyTorch's path is the plan that it runs.
    same = choice(FAST, replace(SLOW, time_ms=2.0, runs="eng1"))
    assert (same.pytorch_ms, same.speedup) == (2.0, 1.0)
    assert "PyTorch would run the same" in repr(same)


@pytest.mark.parametrize("ranking", [(FAST,), (timed("eng1", None),), (FAST, timed("aten", None))])
def test_a_time_that_is_not_known_is_said(ranking: Sequence[Measurement]) -> None:
    made = choice(*ranking)
    assert (made.pytorch_ms, made.speedup) == (None, None)
    assert "speedup unknown, " in repr(made)


def test_a_difference_within_the_intervals_may_be_noise() -> None:
    made = choice(replace(FAST, low_ms=1.5, high_ms=3.5), replace(SLOW, low_ms=2.5, high_ms=3.5))
    assert "speedup 1.50x, which may be noise" in repr(made)


def test_a_notebook_shows_choices_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = choice(FAST, SLOW)
    monkeypatch.setattr(choice_log, "_records", {0: made})
    found = ca.choices()
    assert found == [made]
    assert pickle.loads(pickle.dumps(copy.copy(found)[:0])) == []
    page = ET.fromstring(f"<html>{found._repr_html_()}</html>")  # type: ignore[attr-defined]
    head, row = page.iter("tr")
    columns = [cell.text for cell in head if cell.tag == "th"]
    assert columns == ["problem", "chosen", "time, ms", "speedup", "how"]
    cells = dict(zip(columns, (cell.text for cell in row), strict=True))
    assert cells["problem"] == made.problem.text
    assert cells["chosen"] == made.text
    assert cells["speedup"] == f"{made.speedup:.2f}"


def test_a_model_that_was_tuned_says_what_a_step_gains() -> None:
    twice, once = decided(FAST, SLOW), decided(FAST, problem=problem(stride=2))
    calls = {twice.problem: 2, once.problem: 1}
    made = Tuned([twice, once], calls, "Net, forward + backward", 4.13)
    assert repr(made) == str(made) == LINE
    assert made.speedup == 1.5
    assert made == [twice, once]
    assert f'<td style="text-align:left">{twice.problem.text}</td>' in made._repr_html_()


LINE = (
    "Net, forward + backward: 6.000 -> 4.000 ms a step by estimate of its 2 convolution calls "
    "(1.50x), tuned in 4.1 s; 1 more not counted, since PyTorch's time is not known"
)
