"""Process-wide settings and who wins: argument, context, set_*, environment, default."""

from __future__ import annotations

import inspect
import math
import re
import sys
import threading
import time
import typing
from pathlib import Path
from typing import Any

import pytest
from support import checkout
from support.processes.subprocesses import evaluate, python
from support.tuning.strategies import BUILT_IN_MODES

import cudnn_autotune as ca
from cudnn_autotune.compile.programs import Options
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.tuning import miss

VARIABLES = {
    "CUDNN_AUTOTUNE_SAMPLING": "sample_once",
    "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "1048576",
    "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": "7",
    "CUDNN_AUTOTUNE_BUDGET_MS": "12.5",
    "CUDNN_AUTOTUNE_NEW_SHAPES": "tune",
}


def settings() -> tuple[str, int | None, int, float | None, str]:
    return (
        ca.get_sampling(),
        ca.get_workspace_limit(),
        ca.get_benchmark_limit(),
        ca.get_budget_ms(),
        ca.get_new_shapes(),
    )


# In processes of their own, as the environment is read when the package is imported.

OTHERS = {
    "CUDNN_AUTOTUNE_SAMPLING": "mine",
    "CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT": "7",
    "CUDNN_AUTOTUNE_PREFETCH": "off",
}
READ = """
import warnings
warnings.simplefilter("error")
import torch, cudnn_autotune as ca
def show():
    print(ca.get_sampling(), ca.get_workspace_limit(), ca.get_benchmark_limit(),
          ca.get_budget_ms(), ca.get_new_shapes())
show()
print(ca.settings.is_prefetching(), ca._C and ca._C.plan_cache_capacity())
ca.Conv2d(4, 6, 3)(torch.randn(2, 4, 9, 8))
try:
    ca.sampling.get(ca.get_sampling())
except ValueError as error:
    print(error)
with ca.flags("race"):
    pass
class Mine:
    name = "mine"
    def select(self, candidates, timer, limits):
        return None
ca.sampling.register(Mine())
print(type(ca.sampling.get(ca.get_sampling())).__name__)
ca.set_sampling("heuristic")
ca.set_workspace_limit(5)
ca.set_benchmark_limit(3)
ca.set_budget_ms(80)
ca.set_new_shapes("neighbour")
show()
"""


def test_the_environment_is_read_then_setters_win() -> None:
    """A mode that the environment names may be registered after the import."""
    read, others, refused, found, after = evaluate(READ, VARIABLES | OTHERS).splitlines()
    assert read == "mine 1048576 7 12.5 tune"
    assert others == ("False 7" if extension_available() else "False None")
    assert refused.startswith("CUDNN_AUTOTUNE_SAMPLING must be one of 'heuristic', ")
    assert ", got 'mine'" in refused
    assert found == "Mine"
    assert after == "heuristic 5 3 80.0 neighbour"


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: ca.Conv2d(3, 4, 3, sampling="rase"), "race"),  # type: ignore[arg-type, unused-ignore]
        (lambda: ca.convert(ca.Conv2d(3, 4, 3), "heuristics"), "heuristic"),
        (lambda: ca.set_sampling("sustaind"), "sustained"),
        (lambda: ca.set_new_shapes("onlin"), "online"),  # type: ignore[arg-type]
        (lambda: ca.set_store(mode="readwrite"), "read_write"),
        (lambda: ca.ConvProblem("fprp", (1, 3, 8, 8), (4, 3, 3, 3)), "fprop"),  # type: ignore[arg-type]
        (lambda: Options.read(None, {"samplin": "race"}), "sampling"),
        (lambda: Options.read(None, {"max_autotun": True}), "max_autotune"),
        (lambda: Options.read(None, {"fuse": "alway"}), "always"),
    ],
)
def test_an_unknown_name_is_answered_by_the_nearest(call: Any, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'\\?$"):
        call()
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        ca.set_sampling("xyz")


TAKE_A_MODE = {
    ca.Conv2d.__mro__[2].__init__: "sampling",
    ca.convert: "sampling",
    ca.enable: "sampling",
    ca.set_sampling: "mode",
    ca.flags: "sampling",
    ca.Store.find: "sampling",
    ca.Store.put: "sampling",
}


@pytest.mark.parametrize("function", TAKE_A_MODE, ids=lambda function: function.__qualname__)
def test_editors_know_the_modes(function: Any) -> None:
    taken = typing.get_type_hints(inspect.unwrap(function))[TAKE_A_MODE[function]]
    literals = [one for one in typing.get_args(taken) if typing.get_origin(one) is typing.Literal]
    assert [set(typing.get_args(one)) for one in literals] == [set(ca._MODES)]


BAD = {
    "CUDNN_AUTOTUNE_SAMPLING": 'my"mode',
    "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "lots",
    "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": "ten",
    "CUDNN_AUTOTUNE_BUDGET_MS": "a second",
    "CUDNN_AUTOTUNE_NEW_SHAPES": "sometimes",
    "CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT": "0",
    "CUDNN_AUTOTUNE_PREFETCH": "no",
    "CUDNN_AUTOTUNE_CACHE": "no",
}
PROGRAM = """import torch

import cudnn_autotune as ca
print(ca.get_sampling(), ca.get_workspace_limit(), ca.get_benchmark_limit(),
      ca.get_budget_ms(), ca.get_new_shapes(), ca.settings.is_prefetching(),
      ca.store_settings.get_store_settings().mode, ca._C and ca._C.plan_cache_capacity())
"""


def test_a_bad_environment_is_told_at_the_users_import(tmp_path: Path) -> None:
    """What is not allowed has the default; but what forbids the store in other words is heard."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python("program.py", env=BAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *found, capacity = done.stdout.split()
    assert found == ["auto", "None", "0", "None", "online", "True", "off"]
    assert capacity == ("10000" if extension_available() else "None")
    for variable, value in BAD.items():
        (line,) = [line for line in done.stderr.splitlines() if f"{variable} must be" in line]
        assert line.startswith(f"{tmp_path / 'program.py'}:3: UserWarning: ")
        assert f"got {value!r}" in line


UNKNOWN_MODE = """
import sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import cudnn_autotune as ca
    from cudnn_autotune.norms import choices as norm_choices
    from cudnn_autotune.tuning import settings
    print(len(said), ca.get_sampling())
    for _ in range(2):
        mode = settings.registered_mode(ca.get_sampling())
    print(len(said), mode, ca.get_sampling(), said[-1].message)
"""


@pytest.mark.parametrize(("mode", "at_import"), [("rce", 1), ("sustaind", 1), ("nothing", 0)])
def test_a_mode_that_nobody_registers_is_told_once_and_is_the_default(
    mode: str, at_import: int
) -> None:
    """At the import if it is misspelt, else at the first use: it may be registered until then."""
    first, second = evaluate(UNKNOWN_MODE, {"CUDNN_AUTOTUNE_SAMPLING": mode}).splitlines()
    assert first == f"{at_import} {mode}"
    assert second.startswith("1 auto auto CUDNN_AUTOTUNE_SAMPLING must be one of 'heuristic', ")
    assert f"got '{mode}'" in second
    assert ("did you mean" in second) == bool(at_import)
    assert second.endswith(" Unless the program registers it, 'auto' is in force")


@pytest.mark.search
def test_the_first_search_in_an_unknown_mode_is_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What C++ asks is in the mode of the environment."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    def choose(miss: Any) -> None:
        asked.append(miss.policy.mode)
        raise Asked

    monkeypatch.setattr(miss, "_choose", choose)
    ca.settings.read_environment({"CUDNN_AUTOTUNE_SAMPLING": "a mode of nobody"})
    problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 8, 3, 3)).native()
    with pytest.warns(UserWarning, match="got 'a mode of nobody'"), pytest.raises(Asked):
        miss.choose(problem, ca.get_sampling(), -1, 0, 0)
    assert asked == [ca.get_sampling()] == ["auto"]


@pytest.mark.parametrize(
    ("name", "near"), [("BUDGET", "BUDGET_MS"), ("CACHEDIR", "CACHE_DIR"), ("XYZ", None)]
)
def test_a_variable_that_does_not_exist_is_told_once(name: str, near: str | None) -> None:
    environ = {f"CUDNN_AUTOTUNE_{name}": "1", "CUDNN": "2"}
    with pytest.warns(UserWarning, match=f"CUDNN_AUTOTUNE_{name}: ") as said:
        ca.settings.read_environment(environ)
    (one,) = said
    ca.settings.read_environment(environ)  # where a second warning would be an error
    end = f"; the nearest is CUDNN_AUTOTUNE_{near}" if near else "there is no such variable"
    assert str(one.message).endswith(end)


def test_the_documentation_lists_the_variables() -> None:
    text = (checkout.ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\|.*\|.*\| `([A-Z_]+)` \|.*\|$", text, re.MULTILINE)
    names = [name.removeprefix(ca.settings.PREFIX) for name in ca.settings.VARIABLES]
    assert sorted([*listed, "ISOLATED"]) == sorted(names)


BAD_VALUES = {
    "SAMPLING": ["two\nlines"],
    "WORKSPACE_LIMIT": ["-1", "lots", str(1 << 70)],
    "BENCHMARK_LIMIT": ["-2", "1.5", str(1 << 40)],
    "BUDGET_MS": ["0", "-1", "nan", "inf", "a second"],
    "NEW_SHAPES": ["Tune", "auto"],
}


@pytest.mark.parametrize(
    ("variable", "value"),
    [(f"CUDNN_AUTOTUNE_{name}", v) for name, values in BAD_VALUES.items() for v in values],
)
def test_bad_environment_is_named_and_the_rest_heard(variable: str, value: str) -> None:
    with pytest.warns(UserWarning, match=variable) as said:
        ca.settings.read_environment({**VARIABLES, variable: value})
    assert len(said) == 1
    assert repr(value) in str(said[0].message) or value in str(said[0].message)
    defaults = ("auto", None, 0, None, "online")
    heard = ("sample_once", 1 << 20, 7, 12.5, "tune")
    assert settings() == tuple(
        default if name == variable else other
        for name, default, other in zip(VARIABLES, defaults, heard, strict=True)
    )


def test_context_beats_setters_and_nests() -> None:
    ca.set_sampling("sample_once")
    ca.set_workspace_limit(100)
    ca.set_benchmark_limit(9)
    with ca.flags("heuristic", workspace_limit=50):
        assert settings()[:3] == ("heuristic", 50, 9)
        with ca.flags("median_of_three", benchmark_limit=2):
            assert settings()[:3] == ("median_of_three", 50, 2)
        assert settings()[:3] == ("heuristic", 50, 9)
    assert settings()[:3] == ("sample_once", 100, 9)
    ca.set_workspace_limit(None)
    assert ca.get_workspace_limit() is None


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.0, -1, -1e-9, math.nan, math.inf, -math.inf, True, False, "100", [1.0], 1j]
)
def test_bad_budgets_are_named_and_change_nothing(value: object) -> None:
    ca.set_sampling("race")
    ca.set_budget_ms(7)
    before = settings()
    for use in (
        ca.set_budget_ms,
        lambda v: ca.flags("heuristic", workspace_limit=3, budget_ms=v).__enter__(),
    ):
        with pytest.raises(ValueError) as error:
            use(value)  # type: ignore[operator]
        assert "budget_ms" in str(error.value)
        assert repr(value) in str(error.value)
        assert settings() == before


def test_setters_are_process_wide_and_seen_in_threads() -> None:
    ca.set_sampling("median_of_three")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ca.get_sampling()))
    thread.start()
    thread.join()
    assert seen == ["median_of_three"]


def test_threads_do_not_undo_what_others_set() -> None:
    """Each setting on its own: one that was read, and is written back, would be the older one."""
    ends = threading.Event()

    def limits() -> None:
        while not ends.is_set():
            ca.set_workspace_limit(5)
            with ca.flags(benchmark_limit=3):
                pass

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=limits)
    undone = 0
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for turn in range(3000):
            mode = ("race", "heuristic")[turn % 2]
            ca.set_sampling(mode)
            time.sleep(0)
            undone += ca.get_sampling() != mode
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert undone == 0


def test_a_context_restores_only_what_it_has_set() -> None:
    with ca.flags("race"):
        ca.set_workspace_limit(5)
        ca.set_benchmark_limit(3)
        ca.set_budget_ms(80)
        ca.set_new_shapes("neighbour")
    assert settings() == ("auto", 5, 3, 80.0, "neighbour")
    given = {"workspace_limit": None, "benchmark_limit": 0, "budget_ms": None}
    with ca.flags(**given, new_shapes="online"):  # type: ignore[arg-type]
        assert settings() == ("auto", None, 0, None, "online")
        ca.set_sampling("race")
    assert settings() == ("race", 5, 3, 80.0, "neighbour")


@pytest.mark.parametrize("name", ["", "fastest", "TILL_STABLE", "till-stable", "neighbour"])
def test_unknown_modes_are_named_with_the_allowed(name: str) -> None:
    before = ca.get_sampling()
    uses = {"mode": ca.set_sampling, "sampling": lambda n: ca.flags(n).__enter__()}
    for argument, use in uses.items():
        with pytest.raises(ValueError, match=f"^{argument} must be") as error:
            use(name)  # type: ignore[operator]
        assert all(mode in str(error.value) for mode in BUILT_IN_MODES)
    assert ca.get_sampling() == before


BAD_LIMITS = {
    "workspace_limit": (-1, -(1 << 40), 1.5, "10", object()),
    "benchmark_limit": (-1, -100, 1.5, "10", object()),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, v) for name, values in BAD_LIMITS.items() for v in values]
)
def test_bad_limits_are_named_and_change_nothing(name: str, value: object) -> None:
    before = settings()
    for use in (
        getattr(ca, f"set_{name}"),
        lambda v: ca.flags("heuristic", **{name: v}).__enter__(),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            use(value)
    assert settings() == before


def test_a_registered_mode_is_a_mode() -> None:
    from support.tuning.strategies import COUNTING

    ca.sampling.register(COUNTING)  # again: no harm
    ca.set_sampling(COUNTING.name)
    assert ca.get_sampling() == COUNTING.name
    assert ca.Conv2d(4, 6, 3, sampling=COUNTING.name).sampling == COUNTING.name
    with pytest.raises(ValueError, match=COUNTING.name):
        ca.set_sampling("fastest")  # it is among the allowed
