"""The interface of a sampling mode: a mode gets candidates, a timer and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class Limits:
    """The bounds of a sampling mode's effort."""

    benchmark_limit: int = 0
    """Most candidates of cuDNN that may be timed, in their order; 0: all."""
    budget_ms: float | None = None
    """Most wall time of the choice in milliseconds, plan building included; None: no limit.
    Candidates beyond the budget are left out, and the evidence says so. PyTorch's own path (the
    heuristics' first plan, if it uses cuDNN) is timed at any cost. For ``online`` the budget bounds
    the calls' waits for building and checking, but not the turns."""
    own_path_floor_ms: float | None = None
    """Least time in milliseconds of PyTorch's own path; None: unknown. A search without a budget
    times that path last, and only if no candidate is faster than this: its first call may run
    PyTorch's benchmark mode, which takes as long as a search."""


def check_mode_name(name: object, argument: str) -> str:
    """Returns ``name`` if a sampling mode may have it: it is part of the keys of decisions on disk.

    Raises:
        ValueError: the name is not allowed; the text names ``argument``.
    """
    if isinstance(name, str) and name and name.isprintable() and not set(name) & set('"\\'):
        return name
    raise ValueError(
        f"{argument} must be a printable text that is not empty, without quotes and backslashes, "
        f"got {name!r}"
    )


class Candidates(Protocol):
    """The candidates of one problem, queried from cuDNN when they are first needed."""

    @property
    def problem(self) -> ConvProblem | None:
        """The problem, if it is known."""

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        """Returns the candidates of heuristic mode ``A``, ``B`` or ``FALLBACK`` that no mode before
        it lists."""

    def all(self) -> Sequence[Candidate]:
        """Returns the candidates of all three modes, in this order."""

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates that no heuristic lists: PyTorch's own path (``OWN_PATH``), then
        others, such as implementations' offers."""

    def similar(self) -> Sequence[Candidate]:
        """Returns the candidates that were chosen for similar problems, the nearest problem's
        first, whether a heuristic lists them or not."""

    @property
    def aten_uses_cudnn(self) -> bool:
        """Whether PyTorch's own path for the problem is cuDNN (its heuristics' first plan)."""


SamplingMode = Literal[
    "heuristic",
    "sample_once",
    "median_of_three",
    "till_stable",
    "race",
    "sustained",
    "auto",
    "online",
]
"""The names of this package's modes. Arguments also take the name of a registered one."""


class Strategy(Protocol):
    """A sampling mode. ``name`` is what users pass as ``sampling=``.

    It may declare the attributes of :class:`Traits`.
    """

    @property
    def name(self) -> str: ...

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        """Chooses a candidate.

        Returns:
            The selection; None if no candidate runs, and ATen's convolution serves the problem.
        """


Shortlister = Callable[[Candidates, int], Sequence[Candidate]]
"""(candidates, ``Limits.benchmark_limit``) -> the candidates that a mode looks at."""


@dataclass(frozen=True)
class Traits:
    """The optional attributes of a mode, with their defaults."""

    times: bool = True
    """Whether it times candidates. A mode that does not chooses on the caller's own tensors, and
    gains nothing if a new size is served by a neighbour's choice."""
    decides_later: bool = False
    """Whether a trial in the caller's later calls decides, as in ``online``, among the candidates
    of ``shortlist``. It needs no ``select``, and models cannot be tuned beforehand."""
    races_models: bool = False
    """Whether a model's problems are tuned in one common race within ``budget_s``, instead of one
    by one by ``select``."""
    shortlist: Shortlister | None = None
    """The candidates that it looks at, which are compiled ahead; None: the mode takes compiled
    ones, or compiles itself."""


def everything(candidates: Candidates) -> list[Candidate]:
    """Returns all candidates, the choices for similar problems first."""
    return [*candidates.similar(), *candidates.all(), *candidates.beyond()]


def traits_of(strategy: Strategy) -> Traits:
    """Returns a mode's traits.

    Raises:
        TypeError: an attribute has another type than in :class:`Traits`, or a mode that decides
            later has no ``shortlist``.
    """
    given: dict[str, Any] = {f.name: getattr(strategy, f.name, f.default) for f in fields(Traits)}
    found = Traits(**given)
    for name in ("times", "decides_later", "races_models"):
        if not isinstance(given[name], bool):
            raise TypeError(f"strategy.{name} must be a bool, got {shown(given[name])}")
    if found.shortlist is None and found.decides_later:
        raise TypeError("strategy must have a method shortlist if its decides_later is True")
    if found.shortlist is not None and not callable(found.shortlist):
        raise TypeError(f"strategy.shortlist must be a method, got {shown(found.shortlist)}")
    return found


# Compiling a config at run time takes one thread of the host some 0.3 s, and 0.44 s where all
# threads compile (docs/findings/kernel-portfolio.md: 37 ms a kernel on twelve of them).
_COMPILING_MS = 450.0


class Budget:
    """The rest of ``limits.budget_ms`` by the timer's wall clock; None is no limit."""

    def __init__(self, timer: Timer, limits: Limits) -> None:
        self._timer = timer
        self._budget_ms = math.inf if limits.budget_ms is None else limits.budget_ms
        self._has_refused = False

    @property
    def is_limited(self) -> bool:
        return math.isfinite(self._budget_ms)

    @property
    def cut_short_ms(self) -> float | None:
        """The budget in milliseconds if candidates were left out so far; else None."""
        return self._budget_ms if self._has_refused else None

    def left_ms(self) -> float:
        return self._budget_ms - self._timer.elapsed_ms() if self.is_limited else math.inf

    def is_spent(self) -> bool:
        return not self._allows(self.left_ms() > 0)

    def affords(self, wall_ms: float) -> bool:
        return self._allows(self.left_ms() >= wall_ms)

    def compilable(self, count: int, share: float = 1.0) -> int:
        """Returns the number of ``count`` configs that compile in a share of the time left."""
        if not self.is_limited:
            return count
        side_by_side = self._timer.build_threads
        most = max(0, int(share * self.left_ms() / _COMPILING_MS)) * side_by_side
        self._allows(most >= count)
        return min(count, most)

    def _allows(self, is_allowed: bool) -> bool:
        self._has_refused |= not is_allowed
        return is_allowed


def left_unseen(count: int, of: int) -> str:
    """Returns the remark on candidates that the budget left out."""
    return f"the budget left {count} of {of} candidates unseen"
