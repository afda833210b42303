"""What a strategy may see of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_autotune.engines import Candidate
from cudnn_autotune.sampling.selection import Selection


class Timer(Protocol):
    """Builds, runs and times the candidates of one problem on the caller's tensors."""

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        """Those that build and whose workspace can be had, in their order.

        At most ``limit`` of them, 0 for all: with a limit, the rest is not built.
        """

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        """cuDNN's own search (``cudnn_frontend::time_sorted_plan``) over runnable candidates.

        ``technique`` is ``sample_once``, ``median_of_three`` or ``till_stable``; ``limit`` ends it
        after so many candidates have run, 0 never.
        """
