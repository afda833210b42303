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

A backward uses the mode and the workspace limit of its forward. Like
``torch.backends.cudnn.flags``, a context holds for all threads of the process.

``CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT`` (256) is how many built plans each thread keeps. A thread that
goes round more problems than that builds a plan at every call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from cudnn_autotune import sampling
from cudnn_autotune._extension import _C, extension_available
from cudnn_autotune.engines import check_workspace_limit

DEFAULT_SAMPLING = "auto"
_INT32_MAX = 2**31 - 1
_budget_ms: float | None = None


def check_sampling(name: object, argument: str = "sampling") -> str:
    """``name``, if it is a registered mode; else ValueError naming ``argument``."""
    if not isinstance(name, str) or name not in sampling.names():
        allowed = ", ".join(map(repr, sampling.names()))
        raise ValueError(f"{argument} must be one of {allowed}, got {name!r}")
    return name


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


def _set(sampling_mode: str, workspace_limit: int | None, benchmark_limit: int) -> None:
    limit = -1 if workspace_limit is None else workspace_limit
    _C.set_settings(_C.Settings(sampling_mode, limit, benchmark_limit))


def set_sampling(mode: str) -> None:
    """Sets the sampling mode of calls that name none. ValueError for an unknown mode."""
    _set(check_sampling(mode), get_workspace_limit(), get_benchmark_limit())


def set_workspace_limit(workspace_limit: int | None) -> None:
    """Sets the most bytes of workspace that an engine may need; None: no limit."""
    check_workspace_limit(workspace_limit)
    _set(get_sampling(), workspace_limit, get_benchmark_limit())


def set_benchmark_limit(benchmark_limit: int) -> None:
    """Sets how many candidates are timed at most, in the heuristics' order; 0: all.

    PyTorch's ``torch.backends.cudnn.benchmark_limit`` is 10 by default.
    """
    _set(get_sampling(), get_workspace_limit(), _check_benchmark_limit(benchmark_limit))


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
    """Sets what is given for the time of a ``with`` block, and restores what was before.

    Raises:
        ValueError: an unknown mode, a negative limit, a budget of 0 or less.
    """
    budget_before = get_budget_ms()
    before = (get_sampling(), get_workspace_limit(), get_benchmark_limit())
    new_mode = before[0] if mode is None else check_sampling(mode)
    new_workspace_limit = before[1]
    if workspace_limit is not _KEEP:
        new_workspace_limit = cast("int | None", workspace_limit)
        check_workspace_limit(new_workspace_limit)
    new_benchmark_limit = (
        before[2] if benchmark_limit is None else _check_benchmark_limit(benchmark_limit)
    )
    if budget_ms is not _KEEP:
        set_budget_ms(cast("float | None", budget_ms))
    _set(new_mode, new_workspace_limit, new_benchmark_limit)
    try:
        yield
    finally:
        _set(*before)
        set_budget_ms(budget_before)


def _int_of(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{variable} must be a whole number of 0 or more, got {text!r}")
    return number


def _budget_of(environ: Mapping[str, str]) -> float | None:
    text = environ.get("CUDNN_AUTOTUNE_BUDGET_MS", "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            f"CUDNN_AUTOTUNE_BUDGET_MS must be a time in milliseconds above 0, got {text!r}"
        )
    return number


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Sets them from the environment, or to their defaults where it says nothing.

    Raises:
        ValueError: naming the variable and what is allowed.
    """
    mode = environ.get("CUDNN_AUTOTUNE_SAMPLING", "").strip() or DEFAULT_SAMPLING
    check_sampling(mode, "CUDNN_AUTOTUNE_SAMPLING")
    workspace_limit = _int_of(environ, "CUDNN_AUTOTUNE_WORKSPACE_LIMIT")
    check_workspace_limit(workspace_limit, "CUDNN_AUTOTUNE_WORKSPACE_LIMIT")
    benchmark_limit = _int_of(environ, "CUDNN_AUTOTUNE_BENCHMARK_LIMIT") or 0
    _check_benchmark_limit(benchmark_limit, "CUDNN_AUTOTUNE_BENCHMARK_LIMIT")
    plans = _int_of(environ, "CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT")
    if plans == 0:
        raise ValueError("CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT must be 1 or more, got '0'")
    budget_ms = _budget_of(environ)
    # Nothing is set unless all of it is right.
    if plans and extension_available():
        _C.set_plan_cache_capacity(min(plans, _INT32_MAX))
    set_budget_ms(budget_ms)
    _set(mode, workspace_limit, benchmark_limit)
