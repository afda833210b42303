"""The engines of cuDNN for the inner problem of a rewrite, as offers."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_autotune.core.extension import require_cuda_build
from cudnn_autotune.engines.configs import Candidate, Device, open_search, query
from cudnn_autotune.engines.implementations import Offer
from cudnn_autotune.engines.problem import ConvProblem

MOST_OFFERS = 3
"""Most offers of a rewrite for one problem."""


def best_engines(
    problem: ConvProblem, device: Device, modes: Sequence[str] = ("A",)
) -> list[Candidate]:
    """Returns the first config of each family in these heuristic modes, the best guess first."""
    try:
        listed = query(open_search(problem, device), problem, modes)
    except require_cuda_build().CudnnError:  # cuDNN has no graph for it
        return []
    families: dict[tuple[object, ...], Candidate] = {}
    for candidate in listed:
        if not candidate.is_unfused:
            families.setdefault(candidate.config_family, candidate)
    return list(families.values())


def with_compilation(engine: Candidate, own_bytes: int) -> Offer:
    """Returns the offer of an engine between kernels that are compiled at run time, which take
    ``own_bytes`` of workspace."""
    compiled = "RUNTIME_COMPILATION"
    return Offer(
        settings=engine.text,
        workspace_bytes=own_bytes + engine.workspace_bytes,
        numerical_notes=engine.numerical_notes,
        behavior_notes=(*(n for n in engine.behavior_notes if n != compiled), compiled),
    )
