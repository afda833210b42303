"""Compiles engines for several problems at once, before the problems are searched one by one.

A search compiles on several threads, but mostly waits for the one or two engines of its problem. So
the cores are busy only if the engines of many problems are compiled side by side. Their plans are
kept beside the store, where the searches find them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from types import TracebackType

from cudnn_autotune.core.background import COMPILING
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import Candidate, Device, cuda_index, open_search
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import QueriedCandidates
from cudnn_autotune.sampling.auto import Shortlist
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.tuning import remembering, settings

_log = logging.getLogger(__name__)

# The modes that compile before they time anything. The others take what is compiled already, or
# compile on threads of their own.
_MODES = ("auto", "race", "sustained")


class CompilingAhead:
    """Compiles in the background as long as its ``with`` block lasts; what has not begun by then is
    left out."""

    def __init__(self) -> None:
        self._building: dict[tuple[ConvProblem, Device], Future[None]] = {}

    def __enter__(self) -> CompilingAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for building in self._building.values():
            building.cancel()

    def start(
        self, problem: ConvProblem, device: Device, sampling: str, workspace_limit: int | None
    ) -> None:
        """Begins to compile what a search of ``problem`` would, if its plans are kept.

        Args:
            sampling: the mode; an empty text stands for the settings'.
        """
        mode = sampling or settings.get_sampling()
        is_kept = store_settings.is_read() and store_settings.is_written()
        is_limited = settings.get_budget_ms() is not None or settings.get_benchmark_limit() > 0
        if mode not in _MODES or not is_kept or is_limited or (problem, device) in self._building:
            return
        index, nearby = cuda_index(device), []
        if index is not None:
            if remembering.find(problem, mode, workspace_limit, 0, index) is not None:
                return
            nearby = remembering.similar(problem, index)
        future = COMPILING.submit(_compile, problem, device, mode, workspace_limit, nearby)
        self._building[problem, device] = future

    def wait(self, problems: Sequence[ConvProblem], device: Device) -> None:
        """Waits until what was begun for these problems is compiled."""
        wait([self._building[p, device] for p in problems if (p, device) in self._building])


class _WithoutOperands(QueriedCandidates):
    """The candidates of a problem whose tensors do not exist yet. What PyTorch's own path runs on
    makes no difference to what is compiled."""

    aten_uses_cudnn = False


def _compile(
    problem: ConvProblem,
    device: Device,
    mode: str,
    workspace_limit: int | None,
    nearby: Sequence[Candidate],
) -> None:
    try:
        search = open_search(problem, device)
        candidates: Candidates = _WithoutOperands(
            search, problem, (), workspace_limit, nearby, gpu_of(device)
        )
        if mode == "auto":
            candidates = Shortlist(candidates)
        every = [*candidates.all(), *candidates.beyond(), *candidates.similar()]
        texts = list(dict.fromkeys(c.text for c in every if c.is_compiled))
        search.build_many(texts, 1)
    except Exception as error:  # the search meets it too, and knows what to do
        _log.debug("%s: nothing is compiled ahead: %s", problem.text, error)
