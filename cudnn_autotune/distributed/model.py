"""The tuning of a model's convolutions by all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.distributed.group import Group, group_of, turn_of
from cudnn_autotune.distributed.rendezvous import exchange_with
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json
from cudnn_autotune.models import memory_format as layouts
from cudnn_autotune.models.problems import NOTHING_SERVED
from cudnn_autotune.models.tune import (
    Tuned,
    calls_in,
    can_tune,
    check_arguments,
    find_in,
    mode_for,
    passes,
    try_inputs,
    tune_problems,
)
from cudnn_autotune.nn.modules import check_inputs
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning import remembering, settings, tune_problem
from cudnn_autotune.tuning.pins import pins

TuneOne = Callable[[ConvProblem], Decision]

_log = logging.getLogger(__name__)


def tune(
    model: nn.Module,
    *inputs: Any,
    train: bool = True,
    budget_s: float | None = None,
    memory_format: Literal["auto"] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
    **kwargs: Any,
) -> Tuned:
    """Tunes the problems of ``model(*inputs, **kwargs)`` on all ranks of a group together.

    Every rank of the group calls it, with a model and inputs on its own CUDA device. The model runs
    once (see ``problems_of``). Then one rank tunes each problem, in the sampling mode of the
    settings. At the end all ranks have the same choices, at about the cost of one rank's share.
    Ranks share only with ranks of an equal GPU and version of cuDNN. A rank whose part of the model
    has no convolution tunes problems of the others. Random number generators are left as they were.
    Without torch.distributed this process tunes all problems. A layer whose ``sampling=`` differs
    from the settings' mode still tunes at its first call.

    It has the arguments of ``cudnn_autotune.tune``, and ``group`` and ``timeout_s``.

    Args:
        model: a DistributedDataParallel in it averages no gradients during the run.
        inputs, kwargs: as for a call of the model; the local batch of this rank.
        train: whether the backward is tuned, too.
        budget_s: seconds of wall time from the end of the model's run, on each rank, after which
            timing ends; None: no limit. A rank then answers the rest from earlier decisions, or by
            the heuristics' first plan, which no rank stores.
        memory_format: ``"auto"`` tunes the model contiguous and in channels_last, and times its
            step in both on all ranks at once, as ``cudnn_autotune.convert`` does. The model gets
            the layout with the least sum of times. It must not be wrapped yet.
        group: the process group; None: the default one.
        timeout_s: most seconds of a rank for making this call, for running the model once, and for
            any one problem.

    Returns:
        The installed decisions, the same list on all ranks of equal environments. Its text is one
        line, the gain of this rank's step, as of ``cudnn_autotune.tune``. If no rank has a CUDA
        device the list is empty, as there.

    Raises:
        DistributedTuningError: on all ranks, without a change: a rank has raised, died, timed out
            or sent an unreadable message; the version of this package, settings, or pins on equal
            GPUs differ between ranks; no rank has a convolution that this package serves.
        TypeError: ``model`` is not a module, ``train`` no bool, or ``budget_s`` no number.
        ValueError: another ``memory_format``, or ``"auto"`` for a wrapped model; a group without
            this process; a timeout that is not above 0. Without torch.distributed (else it is a
            DistributedTuningError) also: no convolution that this package serves, ``online`` as
            mode, a budget that is negative or for another mode than ``auto``.
    """

    def tune_one(problem: ConvProblem) -> Decision:
        if end_s is None:
            return tune_problem.tune(problem, device, mode)
        left_s = max(0.0, end_s - time.monotonic())
        (decision,) = tune_problems({problem: 1}, device, mode, left_s)
        return decision

    check_arguments(model, train, memory_format)
    name, chosen = passes(type(model).__name__, train), None
    members = group_of(group, timeout_s)
    # No other thread's call comes between the two calls of this one.
    with nullcontext() if members is None else turn_of(members, timeout_s):
        if members is None:
            mode = mode_for(budget_s)
            check_inputs(model, inputs, kwargs)
            if not can_tune():
                try_inputs(model, inputs, kwargs)
                return Tuned([], {}, name)
            found = find_in(memory_format, train, model, inputs, kwargs)
            if found.device is None:
                raise ValueError(NOTHING_SERVED)
            device = found.device
            end_s = None if budget_s is None else time.monotonic() + budget_s
            decisions = [tune_one(problem) for problem in found.counts]
        else:
            with exchange_with(members, timeout_s) as exchange:
                mode = mode_for(budget_s)
                exchange.note("a first run of the model")
                found = find_in(memory_format, train, model, inputs, kwargs)
                end_s = None if budget_s is None else time.monotonic() + budget_s
                here = torch.cuda.current_device() if torch.cuda.is_available() else 0
                device = here if found.device is None else found.device
                terms = {
                    "call": "tune",
                    "train": train,
                    "budget_s": budget_s,
                    "memory_format": memory_format,
                    "sampling": mode,
                    "benchmark_limit": settings.get_benchmark_limit(),
                    "workspace_limit": settings.get_workspace_limit(),
                    "budget_ms": settings.get_budget_ms(),
                }
                ranks = exchange.handshake(Environment.of(device), terms)
                is_served, everybody = found.device is not None, range(members.size)
                if not exchange.combine("served", is_served, everybody, _any, bool):
                    if exchange.combine("can tune", can_tune(), everybody, _any, bool):
                        exchange.fail(None, NOTHING_SERVED)
                    exchange.agree()
                    return Tuned([], {}, name)
                decisions = share_in(exchange, ranks, list(found.counts), tune_one, pins())
        # Without other ranks, provisional choices may be tuned again.
        final = [decision for decision in decisions if not decision.selection.evidence.provisional]
        remembering.install(final if members is None else decisions, device)
        if memory_format == "auto":
            with torch.set_grad_enabled(train):
                chosen = _lay_out(model, inputs, kwargs, members, timeout_s).chosen
    return Tuned(decisions, calls_in(found, chosen), name)


def _lay_out(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    members: Group | None,
    timeout_s: float,
) -> layouts.MemoryFormatChoice:
    """Gives the model the faster layout, the same on all ranks."""
    if members is None:
        return layouts.choose(model, inputs, kwargs)
    everybody = range(members.size)
    with exchange_with(members, timeout_s) as exchange:
        exchange.handshake(Environment.of(), {"call": "tune, its layouts"})
        exchange.note("steps of the model in both layouts")
        made = layouts.choose(
            model,
            inputs,
            kwargs,
            lambda own: exchange.combine("times", own, everybody, _summed, _times),
        )
        exchange.agree()
    return made


def _any(answers: Mapping[int, bool]) -> bool:
    return any(answers.values())


def _times(tree: Any) -> list[float] | None:
    return None if tree is None else [float(time_ms) for time_ms in tree]


def _summed(times_ms: Mapping[int, list[float] | None]) -> list[float] | None:
    """Returns the sum over the ranks; None if the model cannot be channels_last on one of them."""
    known = [times for times in times_ms.values() if times is not None]
    if len(known) < len(times_ms):
        return None
    return [sum(of_layout) for of_layout in zip(*known, strict=True)]


def share_in(
    exchange: Exchange,
    ranks: Sequence[int],
    problems: Sequence[ConvProblem],
    tune_one: TuneOne,
    pinned: Mapping[ConvProblem, str] | None = None,
) -> list[Decision]:
    """Tunes each problem on one rank, returns the decisions on all, and ends the call.

    The ranks (as of ``Exchange.handshake``) share the problems of all of them: a free rank takes
    the next one, the largest first. All must have the same pins: else all would agree on an engine
    that one rank has pinned without a measurement.

    Returns:
        One decision for each problem, in the order of the first rank of equal environment, then of
        the others: the same list on all ranks of equal environments.
    """

    def unite(brought: Mapping[int, _Brought]) -> list[Any]:
        for rank in ranks:
            exchange.compare(brought[ranks[0]].pins, brought[rank].pins, ranks[0], rank)
        united = dict.fromkeys(p for rank in sorted(brought) for p in brought[rank].problems)
        return [problem_to_json(problem) for problem in united]

    own = {
        "problems": [problem_to_json(problem) for problem in problems],
        "pins": {f"the pin of {problem_text(p)}": engine for p, engine in (pinned or {}).items()},
    }
    trees = exchange.combine("problems", own, ranks, unite, _Brought.read)
    shared = exchange.read(ranks[0], "its list of all problems", lambda: _problems(trees))
    for index, decision in _tune_share(exchange, ranks, shared, tune_one).items():
        exchange.put_decision(f"tuned/{ranks[0]}/{index}", decision)
    # This rank reads its own decisions too, so that all lists are equal.
    decisions = [
        exchange.get_decision(f"tuned/{ranks[0]}/{index}", partial(_is_on, problem))
        for index, problem in enumerate(shared)
    ]
    exchange.agree()
    return decisions


@dataclass(frozen=True)
class _Brought:
    """A rank's problems and pins."""

    problems: list[ConvProblem]
    pins: dict[str, str]

    @classmethod
    def read(cls, tree: Any) -> _Brought:
        return cls(_problems(tree["problems"]), dict(tree["pins"]))


def _problems(trees: Any) -> list[ConvProblem]:
    return [problem_from_json(tree) for tree in trees]


def _is_on(problem: ConvProblem, decision: Decision) -> bool:
    return decision.problem == problem


def _tune_share(
    exchange: Exchange, ranks: Sequence[int], shared: Sequence[ConvProblem], tune_one: TuneOne
) -> dict[int, Decision]:
    """Tunes this rank's part, by index. Problems are taken one by one, not distributed beforehand.

    FLOPs predict the tuning time only in part. It also depends on the numbers of engines and of
    engines compiled at run time, and on the race. The largest come first, so that no rank begins
    one of them when the others have finished (Graham, Bounds on multiprocessing timing anomalies,
    SIAM J. Appl. Math. 17, 1969).
    """
    start_s = time.perf_counter()
    queue = sorted(range(len(shared)), key=lambda i: (-shared[i].flops, i))
    tuned: dict[int, Decision] = {}
    while (turn := exchange.turn(ranks[0])) < len(queue):
        problem = shared[queue[turn]]
        exchange.note(problem_text(problem))
        tuned[queue[turn]] = _tuned(problem, tune_one)
    _log.info(
        "rank %d tuned %d of %d problems in %.1f s",
        exchange.group.global_rank,
        len(tuned),
        len(shared),
        time.perf_counter() - start_s,
    )
    return tuned


def _tuned(problem: ConvProblem, tune_one: TuneOne) -> Decision:
    decision = tune_one(problem)
    if decision.problem != problem:
        asked, got = problem_text(problem), problem_text(decision.problem)
        raise ValueError(f"tune_one must decide on {asked}, and decided on {got}")
    return decision
