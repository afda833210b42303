"""The choices of this process: recorded, found and forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields
from typing import Protocol

from cudnn_autotune.core.display import NONE, Listed, milliseconds
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.tuning.choice import Choice

Layer = tuple[object, ...]

_COLUMNS = ("problem", "chosen", "time, ms", "speedup", "how")
_lock = ForkSafeLock()
_records: dict[tuple[ConvProblem, Policy, int], Choice] = {}
# A problem may be forgotten while its choice is being made: then that must not be recorded. C++
# keeps the same generation for its table of plans, which it updates only after the miss handler
# returns.
_forgettings = 0
_forgettings_of: Counter[ConvProblem] = Counter()


_SHARED = [f.name for f in fields(ConvProblem) if f.name != "input_shape"]
_layers: set[Layer] = set()
"""The layers with a measured size."""
_sizes: list[Sizes] = []


class Sizes(Protocol):
    """A further record of the measured choices, which follows this one."""

    def add(self, choice: Choice) -> None: ...
    def remove(self, problem: ConvProblem) -> None: ...
    def clear(self) -> None: ...


def layer_of(problem: ConvProblem, device: int) -> Layer:
    """Returns the common part of a layer's problems: all but batch size and spatial sizes."""
    return (device, *(getattr(problem, name) for name in _SHARED))


def is_measured_layer(problem: ConvProblem, device: int) -> bool:
    """Returns whether a size of the problem's layer was measured in this process."""
    with _lock:
        return layer_of(problem, device) in _layers


def keep_in(sizes: Sizes) -> None:
    """Adds a record, which gets all measured choices, earlier and later ones."""
    with _lock:
        for choice in _records.values():
            if choice.total_samples > 0:
                sizes.add(choice)
        _sizes.append(sizes)


def generation(problem: ConvProblem) -> int:
    """Returns a number that grows whenever the choices for ``problem`` are forgotten."""
    with _lock:
        return _forgettings + _forgettings_of[problem]


def record(choice: Choice, since: int | None = None) -> bool:
    """Records ``choice``, unless it was not measured and would replace a measured one.

    Args:
        since: the problem's :func:`generation` when the choice was begun; None stands for the
            current one.

    Returns:
        False if the problem was forgotten since then: the choice is obsolete.
    """
    key = (choice.problem, choice.policy, choice.device)
    with _lock:
        if since not in (None, _forgettings + _forgettings_of[choice.problem]):
            return False
        known = _records.get(key)
        if choice.total_samples > 0 or known is None or known.total_samples == 0:
            _records[key] = choice
        if choice.total_samples > 0:
            _layers.add(layer_of(choice.problem, choice.device))
            for sizes in _sizes:
                sizes.add(choice)
        return True


def find(problem: ConvProblem, policy: Policy, device: int) -> Choice | None:
    """Returns the recorded choice for ``problem`` under a policy."""
    with _lock:
        return _records.get((problem, policy, device))


def choices() -> list[Choice]:
    """Returns every choice of this process, in the order in which they were made. A notebook shows
    the list as a table."""
    with _lock:
        return Listed(_records.values(), "choice", _COLUMNS, _row)


def _row(choice: Choice) -> tuple[object, ...]:
    """Returns the cells of a choice's row in a table."""
    ratio = NONE if choice.speedup is None else f"{choice.speedup:.2f}"
    how = f"{choice.origin}, {choice.sampling}"
    return (choice.problem.text, choice.text, milliseconds(choice.time_ms), ratio, how)


def are_settled(problems: Collection[ConvProblem] | None = None) -> bool:
    """Returns whether the choices of this process for problems, or all of them, will stay: none is
    provisional, unmeasured, or forced by a pin."""
    return not any(
        choice.provisional or choice.origin in ("neighbour", "pinned", "missing")
        for choice in choices()
        if problems is None or choice.problem in problems
    )


def forget_problem(problem: ConvProblem) -> None:
    """Clears the choices for one problem under every policy: its next call looks it up again."""
    with _lock:
        for key in [key for key in _records if key[0] == problem]:
            del _records[key]
        for sizes in _sizes:
            sizes.remove(problem)
        _forgettings_of[problem] += 1
    if extension_available():
        _C.forget_problem(problem.native())


def forget_neighbours() -> None:
    """Clears the choices of all problems that a neighbour's engine serves without a measurement."""
    for problem in {choice.problem for choice in choices() if choice.origin == "neighbour"}:
        forget_problem(problem)


def forget_unsettled(problem: ConvProblem) -> None:
    """Clears the choices for a problem if one of them is provisional, or was not measured: a
    neighbour's engine serves it, or a store that was locked lacked it."""
    unsettled = {"neighbour"} if store_settings.is_locked() else {"neighbour", "missing"}
    for choice in choices():
        is_unsettled = choice.origin in unsettled or choice.lacking
        if choice.problem == problem and is_unsettled:
            forget_problem(problem)
            return


def forget() -> None:
    """Clears all choices, built plans and counts."""
    global _forgettings
    _C.clear_fallbacks()
    if extension_available():
        _C.forget_choices()
    with _lock:
        _records.clear()
        _layers.clear()
        for sizes in _sizes:
            sizes.clear()
        _forgettings += 1


def fallbacks() -> dict[str, int]:
    """Returns counts since :func:`forget`, by reason: of calls that ATen's own convolution served,
    of remembered choices that could not serve and were tuned again, and of what a locked store
    lacks."""
    return dict(_C.fallbacks())
