"""Process-wide settings and who wins: argument, context, set_*, environment, default."""

from __future__ import annotations

import threading

import pytest
from subprocesses import evaluate, python

import cudnn_autotune as ca

SHOW = "import cudnn_autotune as ca; print(ca.get_sampling(), ca.get_workspace_limit(), ca.get_benchmark_limit())"  # noqa: E501


def test_the_modes() -> None:
    assert ca.SAMPLING_MODES[:4] == ("heuristic", "sample_once", "median_of_three", "till_stable")


def test_defaults() -> None:
    assert evaluate(SHOW) == "till_stable None 0"


def test_environment() -> None:
    env = {
        "CUDNN_AUTOTUNE_SAMPLING": "sample_once",
        "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "1048576",
        "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": "7",
    }
    assert evaluate(SHOW, env) == "sample_once 1048576 7"


def test_setters_beat_the_environment() -> None:
    code = (
        "import cudnn_autotune as ca; ca.set_sampling('heuristic'); ca.set_workspace_limit(5);"
        "ca.set_benchmark_limit(3);" + SHOW
    )
    env = {
        "CUDNN_AUTOTUNE_SAMPLING": "sample_once",
        "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "1048576",
        "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": "7",
    }
    assert evaluate(code, env) == "heuristic 5 3"


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("CUDNN_AUTOTUNE_SAMPLING", "fastest", "till_stable"),
        ("CUDNN_AUTOTUNE_WORKSPACE_LIMIT", "-1", "-1"),
        ("CUDNN_AUTOTUNE_WORKSPACE_LIMIT", "lots", "lots"),
        ("CUDNN_AUTOTUNE_BENCHMARK_LIMIT", "-2", "-2"),
        ("CUDNN_AUTOTUNE_BENCHMARK_LIMIT", "1.5", "1.5"),
    ],
)
def test_bad_environment_is_named(variable: str, value: str, allowed: str) -> None:
    done = python("-c", SHOW, env={variable: value})
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError")
    assert variable in last
    assert allowed in last


def test_an_empty_environment_variable_says_nothing() -> None:
    env = {
        "CUDNN_AUTOTUNE_SAMPLING": "",
        "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "",
        "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": "",
    }
    assert evaluate(SHOW, env) == "till_stable None 0"


def test_context_beats_setters_and_nests() -> None:
    ca.set_sampling("sample_once")
    ca.set_workspace_limit(100)
    ca.set_benchmark_limit(9)
    with ca.use_sampling("heuristic", workspace_limit=50):
        assert (ca.get_sampling(), ca.get_workspace_limit(), ca.get_benchmark_limit()) == (
            "heuristic",
            50,
            9,
        )
        with ca.use_sampling("median_of_three", benchmark_limit=2):
            assert ca.get_sampling() == "median_of_three"
            assert ca.get_workspace_limit() == 50
            assert ca.get_benchmark_limit() == 2
        assert ca.get_sampling() == "heuristic"
        assert ca.get_benchmark_limit() == 9
    assert ca.get_sampling() == "sample_once"
    assert ca.get_workspace_limit() == 100


def test_context_is_left_after_an_error() -> None:
    before = ca.get_sampling()
    with pytest.raises(KeyError), ca.use_sampling("heuristic"):
        raise KeyError
    assert ca.get_sampling() == before


def test_setters_are_process_wide_and_seen_in_threads() -> None:
    ca.set_sampling("median_of_three")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ca.get_sampling()))
    thread.start()
    thread.join()
    assert seen == ["median_of_three"]


def test_none_takes_the_workspace_limit_away() -> None:
    ca.set_workspace_limit(0)
    assert ca.get_workspace_limit() == 0
    ca.set_workspace_limit(None)
    assert ca.get_workspace_limit() is None


@pytest.mark.parametrize("name", ["", "fastest", "TILL_STABLE", "till-stable"])
def test_unknown_modes_are_named_with_the_allowed(name: str) -> None:
    before = ca.get_sampling()
    for use in (ca.set_sampling, lambda n: ca.use_sampling(n).__enter__()):
        with pytest.raises(ValueError) as error:
            use(name)
        assert "sampling" in str(error.value)
        assert all(mode in str(error.value) for mode in ca.SAMPLING_MODES)
    assert ca.get_sampling() == before


@pytest.mark.parametrize("value", [-1, -(1 << 40)])
def test_negative_workspace_limits(value: int) -> None:
    for use in (
        ca.set_workspace_limit,
        lambda n: ca.use_sampling("heuristic", workspace_limit=n).__enter__(),
    ):
        with pytest.raises(ValueError, match="workspace_limit"):
            use(value)
    assert ca.get_workspace_limit() is None
    assert ca.get_sampling() != "heuristic"


@pytest.mark.parametrize("value", [-1, -100])
def test_negative_benchmark_limits(value: int) -> None:
    for use in (
        ca.set_benchmark_limit,
        lambda n: ca.use_sampling("heuristic", benchmark_limit=n).__enter__(),
    ):
        with pytest.raises(ValueError, match="benchmark_limit"):
            use(value)
    assert ca.get_benchmark_limit() == 0


@pytest.mark.parametrize("value", [1.5, "10", object()])
def test_limits_are_integers(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="workspace_limit"):
        ca.set_workspace_limit(value)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="benchmark_limit"):
        ca.set_benchmark_limit(value)  # type: ignore[arg-type]
