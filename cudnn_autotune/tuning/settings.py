"""Process-wide settings, which a call uses for arguments that it does not give.

The first given one of these wins:

1. the argument of a layer or call (``sampling=``, ``workspace_limit=``),
2. the innermost :func:`flags` context,
3. :func:`set_sampling`, :func:`set_workspace_limit`, :func:`set_benchmark_limit`,
   :func:`set_budget_ms`, :func:`set_new_shapes`,
4. the environment, read when the package is imported: ``CUDNN_AUTOTUNE_SAMPLING``,
   ``CUDNN_AUTOTUNE_WORKSPACE_LIMIT`` (bytes), ``CUDNN_AUTOTUNE_BENCHMARK_LIMIT``,
   ``CUDNN_AUTOTUNE_BUDGET_MS``, ``CUDNN_AUTOTUNE_NEW_SHAPES``,
5. the defaults: ``auto``, no limit, every candidate, the mode's own budget, ``online``.

An unknown variable, or a forbidden value, causes a warning and is ignored.
``CUDNN_AUTOTUNE_SAMPLING`` may name a mode that is registered after the import. If the first search
does not find it, the default is used, with a warning.

A backward uses the mode and the workspace limit of its forward. Like
``torch.backends.cudnn.flags``, a context holds for all threads of the process.

``CUDNN_AUTOTUNE_PREFETCH=off`` switches off reading back compiled plans of remembered choices
before calls need them (``tuning.prefetching``).

``CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT`` (10,000) is the number of built plans that each thread keeps. A
thread that cycles through more problems builds a plan at every call.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import EllipsisType
from typing import Any, Literal, get_args

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.engines.configs import check_workspace_limit
from cudnn_autotune.engines.implementations import ISOLATED
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import SamplingMode, check_mode_name
from cudnn_autotune.store.environment import FOLDER_VARIABLE
from cudnn_autotune.store.notices import warn_once
from cudnn_autotune.store.settings import MODE_VARIABLE, check_store_mode

DEFAULT_SAMPLING = "auto"
NewShapes = Literal["online", "neighbour", "tune"]
NEW_SHAPES: tuple[NewShapes, ...] = get_args(NewShapes)
"""The values that :func:`set_new_shapes` allows, the default first."""
_INT32_MAX = 2**31 - 1
_MISSPELT = 0.75  # difflib's ratio from which a name counts as a misspelling of another
_budget_ms: float | None = None
_new_shapes: NewShapes = NEW_SHAPES[0]
_is_prefetching = True


def check_sampling(name: object, argument: str = "sampling") -> str:
    """Returns ``name`` if it is a registered mode; else raises ValueError naming ``argument``."""
    return sampling.check(name, argument)


def check_policy(sampling_mode: str | None, workspace_limit: int | None) -> None:
    """Checks two arguments of a layer or call; a ValueError names the forbidden one."""
    if sampling_mode is not None:
        check_sampling(sampling_mode)
    check_workspace_limit(workspace_limit)


def _check_benchmark_limit(limit: int, argument: str = "benchmark_limit") -> int:
    is_int = isinstance(limit, int) and not isinstance(limit, bool)
    if not is_int or not 0 <= limit <= _INT32_MAX:
        raise ValueError(
            f"{argument} must be a number of candidates up to 2**31 - 1, or 0 for all, "
            f"got {limit!r}"
        )
    return limit


def _check_budget_ms(budget_ms: float | None, argument: str = "budget_ms") -> float | None:
    if budget_ms is None:
        return None
    is_number = isinstance(budget_ms, (int, float)) and not isinstance(budget_ms, bool)
    if not is_number or not 0 < budget_ms < math.inf:
        raise ValueError(
            f"{argument} must be None or a time in milliseconds above 0, got {budget_ms!r}"
        )
    return float(budget_ms)


def _check_new_shapes(policy: object, argument: str = "new_shapes") -> NewShapes:
    if not isinstance(policy, str) or policy not in NEW_SHAPES:
        allowed = ", ".join(map(repr, NEW_SHAPES))
        meant = did_you_mean(policy, NEW_SHAPES)
        raise ValueError(f"{argument} must be one of {allowed}, got {policy!r}{meant}")
    return policy


def get_sampling() -> str:
    """Returns the sampling mode of calls that name none."""
    return str(_C.settings().sampling)


def get_workspace_limit() -> int | None:
    """Returns the limit of an engine's workspace in bytes; None: no limit."""
    limit = int(_C.settings().workspace_limit)
    return None if limit < 0 else limit


def get_benchmark_limit() -> int:
    """Returns the largest number of timed candidates; 0: all."""
    return int(_C.settings().benchmark_limit)


def policy_of(mode: str) -> Policy:
    """Returns the policy of calls of this mode under the present limits."""
    return Policy(mode, get_workspace_limit(), get_benchmark_limit())


def get_budget_ms() -> float | None:
    """Returns the most wall time of one choice in milliseconds; None: the mode's own."""
    return _budget_ms


def get_new_shapes() -> NewShapes:
    """Returns the rule for new sizes of layers whose sizes keep changing."""
    return _new_shapes


def is_prefetching() -> bool:
    """Returns whether plans of remembered choices are read back before a call needs them."""
    return _is_prefetching


# Each setting is set on its own, so that no thread undoes another's setting.
def set_sampling(mode: SamplingMode | str) -> None:
    """Sets the sampling mode of calls that name none. Raises ValueError for an unknown mode."""
    _C.set_sampling(check_sampling(mode, "mode"))


def set_workspace_limit(workspace_limit: int | None) -> None:
    """Sets the limit of an engine's workspace in bytes; None: no limit. Raises ValueError for a
    negative number."""
    limit = check_workspace_limit(workspace_limit)
    _C.set_workspace_limit(-1 if limit is None else limit)


def set_benchmark_limit(benchmark_limit: int) -> None:
    """Sets the largest number of timed candidates, in the heuristics' order; 0: all.

    PyTorch's ``torch.backends.cudnn.benchmark_limit`` is 10 by default. Raises ValueError for a
    negative number.
    """
    _C.set_benchmark_limit(_check_benchmark_limit(benchmark_limit))


def set_budget_ms(budget_ms: float | None) -> None:
    """Sets the most wall time of one choice in milliseconds, plan building included.

    None stands for the mode's own time. With a smaller budget fewer candidates are timed, in
    cuDNN's order, and each with fewer samples; the choice's evidence names the omissions. A running
    kernel is never stopped, so the first launch of a slow candidate can exceed the budget.
    PyTorch's own path is always timed: no candidate is chosen over it without a comparison. With
    ``online`` the budget bounds the sum of the calls' waits for building and checking: once it is
    spent, no other candidate joins. The calls that compare candidates do not count. Choices of this
    process stay when the budget changes. Raises ValueError for a number that is not above 0.
    """
    global _budget_ms
    _budget_ms = _check_budget_ms(budget_ms)


def set_new_shapes(new_shapes: NewShapes) -> None:
    """Sets the rule for calls with a new batch size or new spatial sizes of a layer.

    It holds if a measured size, of this process or in the store, differs by less than a factor of
    two. Other sizes are tuned until the layer has met eight more.

    Args:
        new_shapes: ``"neighbour"``: the winner on the nearest size serves, without a measurement.
            ``"online"``: likewise; if the size is called more often, fast candidates of nearby
            sizes, the heuristics' first plan and PyTorch's own path take turns in these calls until
            one is chosen. ``"tune"``: every size is tuned by its mode. Choices of a neighbour
            without a measurement are then forgotten, and tuned at their next call.

    Raises:
        ValueError: ``new_shapes`` is none of these.
    """
    global _new_shapes
    _new_shapes = _check_new_shapes(new_shapes)
    if _new_shapes == "tune":
        with IMPORTING:
            from cudnn_autotune.tuning import choice_log

        choice_log.forget_neighbours()


@contextmanager
def flags(
    sampling: SamplingMode | str | None = None,
    *,
    workspace_limit: int | EllipsisType | None = ...,
    benchmark_limit: int | None = None,
    budget_ms: float | EllipsisType | None = ...,
    new_shapes: NewShapes | None = None,
) -> Iterator[None]:
    """Sets the given settings within a ``with`` block, and restores their former values after it.

    As ``torch.backends.cudnn.flags`` it holds for all threads of the process. Other settings stay
    as they are.

    Args:
        sampling: as :func:`set_sampling`.
        workspace_limit: as :func:`set_workspace_limit`; None: no limit.
        benchmark_limit: as :func:`set_benchmark_limit`; 0: all candidates.
        budget_ms: as :func:`set_budget_ms`; None: the mode's own time.
        new_shapes: as :func:`set_new_shapes`.

    Raises:
        ValueError: an argument is not allowed, as in the function that sets it; none is set then.
    """
    settings: tuple[tuple[Any, Any, Callable[[Any], Any], Any, Any], ...] = (
        (sampling, None, check_sampling, get_sampling, _C.set_sampling),
        (workspace_limit, ..., check_workspace_limit, get_workspace_limit, set_workspace_limit),
        (benchmark_limit, None, _check_benchmark_limit, get_benchmark_limit, set_benchmark_limit),
        (budget_ms, ..., _check_budget_ms, get_budget_ms, set_budget_ms),
        (new_shapes, None, _check_new_shapes, get_new_shapes, set_new_shapes),
    )
    # All arguments are checked before any is set.
    changes = [
        (setter, check(given), getter())
        for given, absent, check, getter, setter in settings
        if given is not absent
    ]
    with ExitStack() as stack:
        for setter, value, before in changes:
            stack.callback(setter, before)
            setter(value)
        yield


def _plan_cache_limit(limit: int, argument: str) -> int:
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{argument} must be 1 or more, got {str(limit)!r}")
    return min(limit, _INT32_MAX)


def _number(kind: Callable[[str], Any], check: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """Returns a function that reads a variable's text as a number, which ``check`` allows."""

    def read(text: str, variable: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        return check(value, variable)

    return read


def _switch(on: str, off: str) -> Callable[[str, str], bool]:
    """Returns a function that reads one of two words."""

    def read(text: str, variable: str) -> bool:
        if text not in (on, off):
            raise ValueError(f"{variable} must be {on} or {off}, got {text!r}")
        return text == on

    return read


def _any_text(text: str, _: str) -> str:
    return text


PREFIX = "CUDNN_AUTOTUNE_"
ENABLE_VARIABLE = "CUDNN_AUTOTUNE_ENABLE"
VARIABLES: dict[str, Callable[[str, str], Any]] = {
    ENABLE_VARIABLE: _switch("1", "0"),
    # Only the form is checked, since a mode may be registered after the import.
    sampling.VARIABLE: check_mode_name,
    "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": _number(int, check_workspace_limit),
    "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": _number(int, _check_benchmark_limit),
    "CUDNN_AUTOTUNE_BUDGET_MS": _number(float, _check_budget_ms),
    "CUDNN_AUTOTUNE_NEW_SHAPES": _check_new_shapes,
    MODE_VARIABLE: check_store_mode,
    FOLDER_VARIABLE: _any_text,
    "CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT": _number(int, _plan_cache_limit),
    "CUDNN_AUTOTUNE_PREFETCH": _switch("on", "off"),
    ISOLATED: _any_text,
}
"""All environment variables of this package at run time, with functions from each one's text and
name to its value. They raise ValueError naming the variable if the text is not allowed."""


def not_understood(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a sentence for each unknown variable of the package's prefix, and each forbidden
    value, by the variable's name."""
    found = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        text = environ[variable].strip()
        if variable not in VARIABLES:
            names = {known.removeprefix(PREFIX): known for known in VARIABLES if known != ISOLATED}
            near = difflib.get_close_matches(variable.removeprefix(PREFIX), names, 1)
            meant = f"; the nearest is {names[near[0]]}" if near else ""
            found[variable] = f"there is no such variable{meant}"
        elif text:
            check = check_sampling if variable == sampling.VARIABLE else VARIABLES[variable]
            try:
                check(text, variable)
            except ValueError as error:
                found[variable] = str(error)
    return found


def value_of(variable: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Returns the value of a variable of ``VARIABLES``; None if it is empty or not set; None, with
    a warning, if its text is not allowed."""
    text = environ.get(variable, "").strip()
    try:
        return VARIABLES[variable](text, variable) if text else None
    except ValueError as error:
        warn_once((variable, text), f"{error}: it is passed over")
        return None


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Sets all settings from the environment. A missing variable, or a forbidden value, stands for
    the default. Forbidden values and unknown variables cause a warning."""
    mode = value_of(sampling.VARIABLE, environ)
    _C.set_sampling(mode or DEFAULT_SAMPLING)
    set_workspace_limit(value_of("CUDNN_AUTOTUNE_WORKSPACE_LIMIT", environ))
    set_benchmark_limit(value_of("CUDNN_AUTOTUNE_BENCHMARK_LIMIT", environ) or 0)
    set_budget_ms(value_of("CUDNN_AUTOTUNE_BUDGET_MS", environ))
    set_new_shapes(value_of("CUDNN_AUTOTUNE_NEW_SHAPES", environ) or NEW_SHAPES[0])
    global _is_prefetching
    _is_prefetching = value_of("CUDNN_AUTOTUNE_PREFETCH", environ) is not False
    plans = value_of("CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT", environ)
    if plans and extension_available():
        _C.set_plan_cache_capacity(plans)
    for variable, text in not_understood(environ).items():
        if variable not in VARIABLES:
            warn_once(variable, f"{variable}: {text}")
    is_unknown = mode is not None and mode not in sampling.names()
    if is_unknown and difflib.get_close_matches(mode, sampling.names(), 1, _MISSPELT):
        _warn_of_mode(mode)


def registered_mode(mode: str) -> str:
    """Returns a mode that serves calls: ``mode`` if it is registered.

    Any other mode comes from the environment, which may name a mode that the program registers
    before its first search. If it has not, a warning is given, and the default is in force from
    then on.
    """
    if mode in sampling.names():
        return mode
    if get_sampling() == mode:
        _C.set_sampling(DEFAULT_SAMPLING)
    _warn_of_mode(mode)
    return DEFAULT_SAMPLING


def _warn_of_mode(mode: str) -> None:
    try:
        check_sampling(mode, sampling.VARIABLE)
    except ValueError as error:
        text = str(error)
        end = f"Unless the program registers it, {DEFAULT_SAMPLING!r} is in force"
        warn_once((sampling.VARIABLE, mode), f"{text}{'' if text[-1] == '?' else '.'} {end}")
