"""Process-wide settings: what a call that does not say so itself uses.

Precedence, the first that is given wins:

1. the argument of a layer or call (``sampling=``, ``workspace_limit=``),
2. the innermost :func:`use_sampling` context,
3. :func:`set_sampling`, :func:`set_workspace_limit`, :func:`set_benchmark_limit`,
   :func:`set_budget_ms`,
4. the environment, read when the package is imported: ``CUDNN_AUTOTUNE_SAMPLING``,
   ``CUDNN_AUTOTUNE_WORKSPACE_LIMIT`` (bytes), ``CUDNN_AUTOTUNE_BENCHMARK_LIMIT``,
   ``CUDNN_AUTOTUNE_BUDGET_MS``,
5. the defaults: ``auto``, no limit, every candidate, the mode's own budget.

A variable whose value is not allowed is warned of and passed over. A mode that is named there may
be registered after the import; a search in a mode that is not registered raises ValueError.

A backward uses the mode and the workspace limit of its forward. Like
``torch.backends.cudnn.flags``, a context holds for all threads of the process.

``CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT`` (256) is how many built plans each thread keeps. A thread that
goes round more problems than that builds a plan at every call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.configs import check_workspace_limit
from cudnn_autotune.sampling.strategy import check_mode_name
from cudnn_autotune.store.notices import warn_once

DEFAULT_SAMPLING = "auto"
_INT32_MAX = 2**31 - 1
_budget_ms: float | None = None


def check_sampling(name: object, argument: str = "sampling") -> str:
    """``name``, if it is a registered mode; else ValueError naming ``argument``."""
    return sampling.get(name, argument).name


def check_policy(sampling_mode: str | None, workspace_limit: int | None) -> None:
    """The two arguments of a layer or call; ValueError naming the one that is not allowed."""
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


def check_budget_ms(budget_ms: float | None, argument: str = "budget_ms") -> float | None:
    """``budget_ms``, if it is None or a time above 0; else ValueError naming ``argument``."""
    if budget_ms is None:
        return None
    is_number = isinstance(budget_ms, (int, float)) and not isinstance(budget_ms, bool)
    if not is_number or not 0 < budget_ms < math.inf:
        raise ValueError(
            f"{argument} must be None or a time in milliseconds above 0, got {budget_ms!r}"
        )
    return float(budget_ms)


def get_sampling() -> str:
    """The sampling mode of calls that name none."""
    return str(_C.settings().sampling)


def get_workspace_limit() -> int | None:
    """The most bytes of workspace that an engine may need; None: no limit."""
    limit = int(_C.settings().workspace_limit)
    return None if limit < 0 else limit


def get_benchmark_limit() -> int:
    """How many candidates are timed at most; 0: all."""
    return int(_C.settings().benchmark_limit)


def get_budget_ms() -> float | None:
    """Wall time that one choice may take, in milliseconds; None: the mode's own."""
    return _budget_ms


# Each setting is set on its own, so that no thread undoes what another sets meanwhile.
def set_sampling(mode: str) -> None:
    """Sets the sampling mode of calls that name none. ValueError for an unknown mode."""
    _C.set_sampling(check_sampling(mode))


def set_workspace_limit(workspace_limit: int | None) -> None:
    """Sets the most bytes of workspace that an engine may need; None: no limit."""
    check_workspace_limit(workspace_limit)
    _C.set_workspace_limit(-1 if workspace_limit is None else workspace_limit)


def set_benchmark_limit(benchmark_limit: int) -> None:
    """Sets how many candidates are timed at most, in the heuristics' order; 0: all.

    PyTorch's ``torch.backends.cudnn.benchmark_limit`` is 10 by default.
    """
    _C.set_benchmark_limit(_check_benchmark_limit(benchmark_limit))


def set_budget_ms(budget_ms: float | None) -> None:
    """Sets the wall time that one choice may take, plan building included, in milliseconds.

    None: what the mode takes. A smaller budget looks at fewer candidates, in cuDNN's order, and at
    each less closely; the choice's evidence says what was left out. A kernel that runs is never
    broken off, so that the first look at a slow candidate can overrun it; and what PyTorch would
    run is looked at whatever it takes: nothing is chosen over it unseen. With ``online`` it bounds
    what calls wait for in all while candidates are built and checked: once it is spent, nobody
    else joins; their turns are not counted. It is not part of what a choice is remembered by: what
    was chosen stays.
    """
    global _budget_ms
    _budget_ms = check_budget_ms(budget_ms)


_KEEP = object()


@contextmanager
def use_sampling(
    mode: str | None = None,
    *,
    workspace_limit: int | object | None = _KEEP,
    benchmark_limit: int | None = None,
    budget_ms: float | object | None = _KEEP,
) -> Iterator[None]:
    """Sets what is given for the time of a ``with`` block, and restores what that was before; what
    is not given stays as it is, then too.

    Raises:
        ValueError: an unknown mode, a negative limit, a budget of 0 or less.
    """
    # All that is given is checked before any of it is set.
    changes: list[tuple[Callable[[Any], None], Any, Any]] = []
    if mode is not None:
        changes.append((_C.set_sampling, check_sampling(mode), get_sampling()))
    if workspace_limit is not _KEEP:
        check_workspace_limit(cast("int | None", workspace_limit))
        changes.append((set_workspace_limit, workspace_limit, get_workspace_limit()))
    if benchmark_limit is not None:
        limit = _check_benchmark_limit(benchmark_limit)
        changes.append((set_benchmark_limit, limit, get_benchmark_limit()))
    if budget_ms is not _KEEP:
        budget = check_budget_ms(cast("float | None", budget_ms))
        changes.append((set_budget_ms, budget, get_budget_ms()))
    with ExitStack() as stack:
        for setter, value, before in changes:
            stack.callback(setter, before)
            setter(value)
        yield


def _whole_number(text: str, variable: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{variable} must be a whole number of 0 or more, got {text!r}")
    return number


def _workspace_limit(text: str, variable: str) -> int:
    limit = _whole_number(text, variable)
    check_workspace_limit(limit, variable)
    return limit


def _benchmark_limit(text: str, variable: str) -> int:
    return _check_benchmark_limit(_whole_number(text, variable), variable)


def _plan_cache_limit(text: str, variable: str) -> int:
    limit = _whole_number(text, variable)
    if limit == 0:
        raise ValueError(f"{variable} must be 1 or more, got '0'")
    return min(limit, _INT32_MAX)


def _budget(text: str, variable: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{variable} must be a time in milliseconds above 0, got {text!r}")
    return number


_VARIABLES: dict[str, Callable[[str, str], Any]] = {
    sampling.VARIABLE: check_mode_name,
    "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": _workspace_limit,
    "CUDNN_AUTOTUNE_BENCHMARK_LIMIT": _benchmark_limit,
    "CUDNN_AUTOTUNE_BUDGET_MS": _budget,
    "CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT": _plan_cache_limit,
}
VARIABLES = _VARIABLES | {sampling.VARIABLE: check_sampling}
"""Each variable of the environment, and what makes its value of its text and name; raises
ValueError, naming it, for what is not allowed."""


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Sets them from the environment, or to their defaults where it says nothing, or what is not
    allowed: that is warned of."""
    said: dict[str, Any] = {}
    for variable, value_of in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        try:
            said[variable] = value_of(text, variable) if text else None
        except ValueError as error:
            said[variable] = None
            warn_once((variable, text), f"{error}: it is passed over")
    mode, workspace_limit, benchmark_limit, budget_ms, plans = said.values()
    # By its name only: who registers a mode can do so only after the import.
    _C.set_sampling(mode or DEFAULT_SAMPLING)
    set_workspace_limit(workspace_limit)
    set_benchmark_limit(benchmark_limit or 0)
    set_budget_ms(budget_ms)
    if plans and extension_available():
        _C.set_plan_cache_capacity(plans)
