"""Generators of random numbers are afterwards what they were."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn import untouched
from cudnn_autotune.nn.untouched import generators_kept, seed_generators
from cudnn_autotune.timers.measuring import operands

_PACKAGE = Path(ca.__file__).parent
_OF_ALL_DEVICES = {"manual_seed_all", "seed_all", "fork_rng", "set_rng_state", "set_rng_state_all"}
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
_DRAWS |= {"bernoulli", "multinomial", "normal", "normal_", "uniform_", "random_", "bernoulli_"}


def _faults(path: Path) -> list[str]:
    """Returns the calls in a file that change a generator of the caller's."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        text, name = ast.unparse(node.func), node.func.attr
        if text.startswith(("random.", "np.random.")):
            is_fault = "Random" not in text and "default_rng" not in text
        else:
            is_draw = name in _DRAWS and not text.startswith(("self.", "rng."))
            is_draw &= "generator" not in {word.arg for word in node.keywords}
            is_fault = is_draw or name in _OF_ALL_DEVICES or text == "torch.manual_seed"
        if is_fault:
            found.append(f"{path.relative_to(_PACKAGE)}: {ast.unparse(node)}")
    return found


def test_nothing_draws_from_generators_of_the_caller() -> None:
    """Processes of commands are the package's own."""
    modules = set(_PACKAGE.rglob("*.py")) - {Path(untouched.__file__)}
    modules -= set((_PACKAGE / "cli").rglob("*.py"))
    assert [fault for module in sorted(modules) for fault in _faults(module)] == []


def test_all_kinds_of_generators_are_kept() -> None:
    def numbers() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    def fails() -> None:
        with generators_kept([]):
            seed_generators([], 4)
            numbers()
            raise KeyError

    numbers()  # imports numpy.random
    with generators_kept([]):
        expected = numbers()
    with generators_kept([]):
        seed_generators([], 3)
        numbers()
    with pytest.raises(KeyError):
        fails()
    assert numbers() == expected


def test_operands_are_drawn_from_a_generator_of_their_own() -> None:
    problem = ConvProblem("fprop", (1, 4, 5, 5), (8, 4, 3, 3), padding=(1, 1))
    state = torch.get_rng_state()
    one, other = operands(problem, "cpu"), operands(problem, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, one, other))
