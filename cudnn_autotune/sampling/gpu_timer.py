"""The timer of a GPU that is here."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from cudnn_autotune._extension import _C
from cudnn_autotune.engines import Candidate
from cudnn_autotune.sampling.selection import Selection, Timed

_MOST_THREADS = 8


class GpuTimer:
    """Builds and times candidates on the caller's own tensors (``sampling.Timer``)."""

    def __init__(
        self,
        search: _C.EngineSearch,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        self._search = search
        self._tensors = (x, w, y)
        self.plans: dict[str, _C.Plan] = {}
        self._workspace: torch.Tensor | None = None

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        found: list[Candidate] = []
        rest = list(candidates)
        while rest and (not limit or len(found) < limit):
            wanted = limit - len(found) if limit else len(rest)
            batch, rest = rest[:wanted], rest[wanted:]
            built = [c for c, plan in zip(batch, self._build(batch), strict=True) if plan]
            found += self._that_fit_in_memory(built)
        return found

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        result = _C.frontend_find(
            technique,
            [self.plans[c.text] for c in candidates],
            *self._tensors,
            self._workspace,
            limit,
        )
        return Selection(
            tuple(
                Timed(candidates[found.index], found.time_ms, found.samples)
                for found in result.plans
            ),
            result.total_samples,
        )

    def release_workspace(self) -> None:
        self._workspace = None

    def _build(self, candidates: Sequence[Candidate]) -> list[_C.Plan | None]:
        missing = [c for c in candidates if c.text not in self.plans]
        # Precompiled engines build in microseconds; only those compiled at run time (some 0.3 s
        # each) are worth threads.
        compiled = sum("RUNTIME_COMPILATION" in c.behavior_notes for c in missing)
        threads = max(1, min(compiled, os.cpu_count() or 1, _MOST_THREADS))
        built = self._search.build_many([c.text for c in missing], threads)
        for candidate, (plan, _) in zip(missing, built, strict=True):
            if plan is not None:
                self.plans[candidate.text] = plan
        return [self.plans.get(c.text) for c in candidates]

    def _that_fit_in_memory(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose workspace can be had: one block, the largest that they need, serves all."""
        needs = {self.plans[c.text].workspace_bytes for c in candidates}
        for most in sorted(needs, reverse=True):
            if most <= self._workspace_bytes():
                break
            try:
                self._workspace = torch.empty(
                    most, dtype=torch.uint8, device=self._tensors[0].device
                )
                break
            except torch.OutOfMemoryError:
                continue
        had = self._workspace_bytes()
        return [c for c in candidates if self.plans[c.text].workspace_bytes <= had]

    def _workspace_bytes(self) -> int:
        return 0 if self._workspace is None else self._workspace.numel()
