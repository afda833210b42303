"""A sampling mode declares its traits, and each room goes by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tuning.strategies import Counting

import cudnn_autotune as ca
from cudnn_autotune.cli.commands import tune as tune_command
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.models.tune import check_budget, mode_for
from cudnn_autotune.sampling import Candidates, Traits, names, register, traits
from cudnn_autotune.tuning import compiling_ahead

PACKAGE = Path(ca.__file__).parent
FRONTENDS = ("sample_once", "median_of_three", "till_stable")


class Declaring(Counting):
    """A mode that declares what a test says."""

    def __init__(self, name: str, **declared: Any) -> None:
        super().__init__()
        self.name = name
        vars(self).update(declared)


def nothing_of(candidates: Candidates, limit: int) -> list[Candidate]:
    return []


RACES = Declaring("test_traits_races", races_models=True)
LATER = Declaring("test_traits_later", decides_later=True, shortlist=nothing_of)
PLAIN = Declaring("test_traits_plain")
for _mode in (RACES, LATER, PLAIN):
    register(_mode)


def test_a_mode_with_only_a_name_and_select_has_the_defaults() -> None:
    assert traits(PLAIN.name) == Traits()
    assert Traits() == Traits(times=True, decides_later=False, races_models=False, shortlist=None)


def test_what_the_modes_of_the_package_declare() -> None:
    plain = {name: replace(traits(name), shortlist=None) for name in names()}
    assert plain["heuristic"] == Traits(times=False)
    assert plain["auto"] == Traits(races_models=True)
    assert plain["race"] == plain["sustained"] == Traits()
    assert plain["online"] == Traits(decides_later=True)
    for name in FRONTENDS:
        assert plain[name] == Traits()
    lists = [name for name in names() if traits(name).shortlist and not name.startswith("test_")]
    assert lists == ["race", "sustained", "auto", "online"]


@pytest.mark.parametrize("trait", ["times", "decides_later", "races_models"])
def test_another_type_is_refused_by_the_name_of_the_attribute(trait: str) -> None:
    with pytest.raises(TypeError, match=rf"strategy\.{trait} must be a \w+, got 'yes'"):
        register(Declaring("test_traits_wrong", **{trait: "yes"}))
    assert "test_traits_wrong" not in names()


def test_a_mode_that_decides_later_needs_no_select() -> None:
    with pytest.raises(TypeError, match="a method select"):
        register(SimpleNamespace(name="test_traits_wrong"))
    register(SimpleNamespace(name="test_traits_calls", decides_later=True, shortlist=nothing_of))
    assert traits("test_traits_calls") == Traits(decides_later=True, shortlist=nothing_of)


def test_a_mode_that_decides_later_must_say_between_whom() -> None:
    with pytest.raises(TypeError, match="must have a method shortlist"):
        register(Declaring("test_traits_wrong", decides_later=True))


def test_a_budget_of_a_model_is_for_modes_that_race_models() -> None:
    check_budget(1.0, RACES.name)
    with pytest.raises(ValueError, match="budget_s must be None in mode 'test_traits_plain'"):
        check_budget(1.0, PLAIN.name)


def test_what_decides_later_is_not_tuned_beforehand() -> None:
    with ca.flags(LATER.name), pytest.raises(ValueError, match="decides in later calls"):
        mode_for(None)
    with pytest.raises(Exception, match="decides in a program's own calls"):
        tune_command._mode(LATER.name)
    assert tune_command._mode(PLAIN.name) == PLAIN.name


def test_engines_are_compiled_ahead_for_what_a_mode_lists() -> None:
    asked = []

    def shortlist(candidates: Candidates, limit: int) -> list[Candidate]:
        asked.append(candidates)
        return []

    register(Declaring("test_traits_lists", shortlist=shortlist))
    problem = ca.ConvProblem("fprop", (2, 16, 9, 9), (16, 16, 3, 3), padding=1)
    for mode in (PLAIN.name, LATER.name, "heuristic", "sample_once", "registered_elsewhere"):
        compiling_ahead.start(problem, "h200", mode, None)
        assert not compiling_ahead._begun
    compiling_ahead.start(problem, "h200", "test_traits_lists", None)
    (listing,) = compiling_ahead._begun.values()
    assert listing.result() == {}
    assert len(asked) == 1
    compiling_ahead.take(problem, "h200")


def test_no_room_outside_asks_which_mode_it_is() -> None:
    """Behaviour goes by traits: nothing above ``sampling`` compares a strategy's class or name."""
    needles = ("isinstance(strategy", "isinstance(sampling.get", "strategy.name ==")
    found = [
        f"{path.relative_to(PACKAGE)}: {needle}"
        for room in ("tuning", "nn", "distributed", "cli", "audit")
        for path in (PACKAGE / room).rglob("*.py")
        for needle in needles
        if needle in path.read_text(encoding="utf-8")
    ]
    assert found == []
