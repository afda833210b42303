"""The ranks of a group tune a list of problems together, and all get all decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.distributed.members import check_timeout_s, members_of
from cudnn_autotune.distributed.subgroups import meet
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

TuneOne = Callable[[ConvProblem], Decision]

_log = logging.getLogger(__name__)


def share(
    problems: Sequence[ConvProblem],
    tune_one: TuneOne,
    environment: Environment,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> list[Decision]:
    """Tunes each problem on one rank, and returns the decisions on all. Nothing is installed.

    Every rank of the group calls it. Ranks of equal environments share the problems that any of
    them brings: whoever is free takes the next, the largest first. Where torch.distributed is not
    initialised, or the group has one rank, it tunes alone, and exceptions are ``tune_one``'s own.

    Args:
        problems: one that is there twice counts once; they may differ from rank to rank.
        tune_one: tunes a problem on this rank.
        environment: of this rank's GPU.
        group: None: the default group.
        timeout_s: how many seconds a rank may take to come, and for any one problem.

    Returns:
        One decision for each problem, in the order of the sub-group's first rank, then of the
        others' own ones: the same list on all ranks of equal environments.

    Raises:
        DistributedTuningError: on all ranks: one has raised, died, timed out or not come.
        ValueError: a group that this process is not in, a timeout that is not above 0.
    """
    check_timeout_s(timeout_s)
    members = members_of(group)
    if members is None:
        return [_tuned(problem, tune_one) for problem in dict.fromkeys(problems)]
    with Exchange(members, timeout_s) as exchange:
        ranks = meet(exchange, environment, {"call": "share"})
        return share_in(exchange, ranks, problems, tune_one)


def share_in(
    exchange: Exchange,
    ranks: Sequence[int],
    problems: Sequence[ConvProblem],
    tune_one: TuneOne,
    pins: Mapping[ConvProblem, str] | None = None,
) -> list[Decision]:
    """:func:`share` within a call that has begun, and that this ends.

    Args:
        ranks: those that share: see ``meet``.
        pins: what is pinned on this rank; the others must have pinned the same.
    """

    def unite(brought: Mapping[int, Any]) -> list[Any]:
        for rank in ranks:
            _compare_pins(exchange, brought, ranks[0], rank)
        return _united({rank: one["problems"] for rank, one in brought.items()})

    brought = {
        "problems": [problem_to_json(problem) for problem in problems],
        "pins": {problem_text(problem): engine for problem, engine in (pins or {}).items()},
    }
    trees = exchange.combine("problems", brought, ranks, unite)
    shared = [problem_from_json(tree) for tree in trees]
    exchange.put("tuned", _tune_share(exchange, ranks, shared, tune_one))
    decisions: dict[int, Decision] = {}
    # This rank's own as well come back as the others see them, so that all lists are equal.
    for rank, tuned in exchange.gather("tuned", ranks).items():
        for number, tree in tuned.items():
            index = int(number)
            decision = Decision.from_json(tree, f"decision {index}")
            if decision.problem != shared[index] or index in decisions:
                exchange.fail(rank, f"it has sent what nobody expected: {decision.key}")
            decisions[index] = decision
    missing = [problem_text(p) for i, p in enumerate(shared) if i not in decisions]
    if missing:
        exchange.fail(None, f"nobody has tuned {', '.join(missing)}")
    exchange.agree()
    return [decisions[i] for i in range(len(shared))]


def _compare_pins(exchange: Exchange, brought: Mapping[int, Any], first: int, rank: int) -> None:
    """Else what one rank has forced upon itself, unmeasured, would be what all have agreed upon."""
    wanted, given = brought[first]["pins"], brought[rank]["pins"]
    for problem in {**wanted, **given}:
        if wanted.get(problem) != given.get(problem):
            exchange.fail(
                rank,
                f"{problem} must be pinned to {wanted.get(problem, 'nothing')}, as on rank "
                f"{exchange.members.ranks[first]}, and is to {given.get(problem, 'nothing')}",
            )


def _united(brought: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Each problem once, as the ranks bring them up."""
    trees = [tree for rank in sorted(brought) for tree in brought[rank]]
    return list({problem_from_json(tree): tree for tree in trees}.values())


def _tune_share(
    exchange: Exchange, ranks: Sequence[int], shared: Sequence[ConvProblem], tune_one: TuneOne
) -> dict[str, Any]:
    """This rank's part: problems are taken one by one, not dealt out beforehand.

    FLOPs are only part of what a problem takes: how many engines there are, how many are compiled
    at run time, and how soon a winner shows is known afterwards. The largest come first, so that
    none of them is what the others wait for at the end (Graham, Bounds on multiprocessing timing
    anomalies, SIAM J. Appl. Math. 17, 1969).
    """
    start_s = time.perf_counter()
    queue = sorted(range(len(shared)), key=lambda i: (-shared[i].flops, i))
    tuned: dict[str, Any] = {}
    while (turn := exchange.turn(ranks[0])) < len(queue):
        index = queue[turn]
        problem = shared[index]
        exchange.note(problem_text(problem))
        tuned[str(index)] = _tuned(problem, tune_one).to_json()
    _log.info(
        "rank %d tuned %d of %d problems in %.1f s",
        exchange.members.ranks[exchange.members.rank],
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
