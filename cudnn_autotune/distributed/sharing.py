"""The ranks of a group tune a list of problems together, and every rank gets all decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_json, problem_text, problem_to_json
from cudnn_autotune.store.decision import Decision

TuneOne = Callable[[ConvProblem], Decision]

_log = logging.getLogger(__name__)


def share_in(
    exchange: Exchange,
    ranks: Sequence[int],
    problems: Sequence[ConvProblem],
    tune_one: TuneOne,
    pins: Mapping[ConvProblem, str] | None = None,
) -> list[Decision]:
    """Tunes each problem on one rank, and returns the decisions on all, which ends the call.

    The ranks (as ``Exchange.handshake`` returns them) share the problems that any of them brings: a
    rank that is free takes the next one, the largest first. All must have the same pins: else all
    would agree on an engine that one rank has pinned without a measurement.

    Returns:
        One decision for each problem, in the order of the first rank of equal environment, then of
        the others' own ones: the same list on all ranks of equal environments.
    """

    def unite(brought: Mapping[int, _Brought]) -> list[Any]:
        for rank in ranks:
            exchange.compare(brought[ranks[0]].pins, brought[rank].pins, ranks[0], rank)
        united = dict.fromkeys(p for rank in sorted(brought) for p in brought[rank].problems)
        return [problem_to_json(problem) for problem in united]

    own = {
        "problems": [problem_to_json(problem) for problem in problems],
        "pins": {f"the pin of {problem_text(p)}": engine for p, engine in (pins or {}).items()},
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
    """The problems and the pins that a rank brings to the call."""

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
    """Tunes this rank's part, by index: problems are taken one by one, not dealt out beforehand.

    FLOPs predict the tuning time only in part: it also depends on how many engines there are, how
    many are compiled at run time, and how soon the race is decided. The largest come first, so that
    no rank begins one of them when the others have finished (Graham, Bounds on multiprocessing
    timing anomalies, SIAM J. Appl. Math. 17, 1969).
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
