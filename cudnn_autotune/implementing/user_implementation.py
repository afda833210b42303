"""An implementation that consists of a user's functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.candidate_id import check_name, check_settings, check_version
from cudnn_autotune.engines.implementations import ISOLATED, Gpu, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import PythonLaunch, Recipe

Build = Callable[[ConvProblem, str], "Callable[..., None] | Recipe"]
"""(problem, settings) -> the function or recipe that computes the problem."""
Settings = Sequence[str] | Callable[[ConvProblem], Sequence[str]]

NUMERICAL_NOTES = ("NONDETERMINISTIC", "TENSOR_CORE", "REDUCED_PRECISION_REDUCTION")
BEHAVIOR_NOTES = ("RUNTIME_COMPILATION",)


@dataclass(frozen=True)
class UserImplementation:
    """The implementation that :func:`~cudnn_autotune.register_implementation` registers, with its
    arguments (an ``engines.implementations.Implementation``).

    Raises:
        TypeError, ValueError: an argument is not allowed; the message names it.
    """

    name: str
    version: str
    supports: Callable[[ConvProblem], bool]
    build: Build
    settings: Settings = ("",)
    workspace: Callable[[ConvProblem, str], int] | None = None
    numerical_notes: Sequence[str] = ()
    behavior_notes: Sequence[str] = BEHAVIOR_NOTES
    calls_python: ClassVar[bool] = True
    """The answer of ``registry.calls_python``."""
    is_users: ClassVar[bool] = True
    """The answer of ``registry.is_users``."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_version(self.version)
        for argument in ("supports", "build"):
            _check_callable(argument, getattr(self, argument))
        if self.workspace is not None:
            _check_callable("workspace", self.workspace)
        if not callable(self.settings):
            object.__setattr__(self, "settings", _settings(self.settings))
        for argument, allowed in (
            ("numerical_notes", NUMERICAL_NOTES),
            ("behavior_notes", BEHAVIOR_NOTES),
        ):
            object.__setattr__(self, argument, _notes(argument, getattr(self, argument), allowed))

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        if ISOLATED in os.environ or not self.supports(problem):
            return ()
        notes = (tuple(self.numerical_notes), tuple(self.behavior_notes))
        return [
            Offer(settings, self._workspace(problem, settings), *notes)
            for settings in self.settings_for(problem)
        ]

    def settings_for(self, problem: ConvProblem) -> Sequence[str]:
        """Returns the offered settings for a supported problem, the best guess first. Errors are
        the user's function's."""
        return _settings(self.settings(problem)) if callable(self.settings) else self.settings

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        return self.built(problem, settings)

    def built(self, problem: ConvProblem, settings: str) -> Recipe:
        """Returns the result of :meth:`recipe`, for the current GPU.

        Raises:
            TypeError: ``build`` returns neither a function nor a recipe.
        """
        built = self.build(problem, settings)
        if isinstance(built, Recipe):
            return built
        if not callable(built):
            raise TypeError(f"build must return a function or a Recipe, got {shown(built)}")
        return Recipe((PythonLaunch(built),), self._workspace(problem, settings))

    def _workspace(self, problem: ConvProblem, settings: str) -> int:
        size = 0 if self.workspace is None else self.workspace(problem, settings)
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63:
            raise ValueError(f"workspace must return a number of bytes, got {shown(size)}")
        return size


def _check_callable(argument: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{argument} must be a function, got {shown(value)}")


def _settings(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"settings must be a sequence of texts, got {shown(given)}")
    return tuple(check_settings(one) for one in given)


def _notes(argument: str, given: Any, allowed: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not set(given) <= set(allowed):
        raise ValueError(f"{argument} must be some of {', '.join(allowed)}, got {shown(given)}")
    return tuple(given)
