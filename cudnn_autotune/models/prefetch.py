"""``prefetch``: plans of a model's remembered choices, made in parallel before they run."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from torch import nn

from cudnn_autotune.engines.offers import gpu_of, kernels_are_kept
from cudnn_autotune.models.problems import find
from cudnn_autotune.nn.modules import check_inputs, check_model
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.tuning import prefetching, remembering, settings


@dataclass(frozen=True)
class Prefetched:
    """The counts of :func:`prefetch`."""

    problems: int
    """Number of the model's problems, under each of its policies."""
    known: int
    """Number of them that have a remembered choice."""
    read_back: int
    """Number of plans that, or whose kernels, were read back."""
    compiled: int
    """Number of plans that had to be compiled."""


def prefetch(model: nn.Module, *inputs: Any, **kwargs: Any) -> Prefetched:
    """Makes the compiled plans of a model's remembered choices on several threads. Its first step
    need not wait for them one by one.

    ``model(*inputs, **kwargs)`` runs once, with cuDNN's heuristics, as for
    ``distributed.problems_of``: forward, and backward unless gradients are off. It times no
    candidate and changes no result. Plans of precompiled engines are left out, because they take
    microseconds. A choice whose plan cannot be made is tuned again at its first call. A plan waits
    for its first call until ``forget()``; the last 256 are kept.

    Without it, the first call that a store's decision serves begins to read back, in the
    background, the compiled plans near that decision.

    Args:
        model: on a CUDA device, in the state (training, autocast, ...) in which it will run.
        inputs, kwargs: arguments of later calls, in their sizes.

    Returns:
        Counts; all are 0 if this package serves no convolution of the model.

    Raises:
        TypeError: ``model`` is not a module, or its forward takes no such ``inputs``.
        ValueError: ``model`` runs on several devices, or has lazy parameters.
        Exception: the model's.
    """
    check_model(model)
    check_inputs(model, inputs, kwargs)
    calls = find(model, inputs, kwargs).calls
    problems = {(c.problem, c.sampling, c.workspace_limit): c.device for c in calls}
    limit = settings.get_benchmark_limit()
    known = [
        choice
        for (problem, sampling, workspace_limit), device in problems.items()
        if (choice := remembering.find(problem, Policy(sampling, workspace_limit, limit), device))
    ]
    wanted = [c for c in known if c.chosen and c.chosen.candidate.is_compiled]
    kept = [kernels_are_kept(c.text, c.problem, gpu_of(c.device)) for c in wanted]
    begun = [prefetching.start([(c.problem, c.text)], c.device, may_compile=True) for c in wanted]
    wait(built for one in begun for built in one)
    is_read_back = [
        are_kept or ((plan := built.result()) is not None and plan.is_read_back)
        for are_kept, one in zip(kept, begun, strict=True)
        for built in one
        if not built.cancelled() and not built.exception()
    ]
    read_back = sum(is_read_back)
    return Prefetched(len(problems), len(known), read_back, len(is_read_back) - read_back)
