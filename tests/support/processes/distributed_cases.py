"""What the ranks of the distributed tests do; every function here runs in each of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune import _C, ConvProblem, sampling
from cudnn_autotune.distributed import (
    DistributedTuningError,
    agree,
    agreement,
    exchange,
    heartbeat,
    tune,
)
from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.distributed.group import group_of
from cudnn_autotune.distributed.model import share_in
from cudnn_autotune.distributed.rendezvous import exchange_with
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.models import memory_format
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning import choice_log, probing, remembering, tune_problem
from cudnn_autotune.tuning.choice import Choice, untimed
from support import simulation
from support.conv.problems import make

OPS = ("fprop", "dgrad", "wgrad")
TuneOne = Callable[[ConvProblem], Decision]


def environment(multiprocessors: int = 132) -> Environment:
    return Environment("simulated GPU", multiprocessors, "9.0", "", "9.19.0", "1.28.0")


def problems(count: int) -> list[ConvProblem]:
    """The same on every rank; of different sizes."""
    return [
        make("resnet_fp16_nhwc", OPS[i % 3], input_shape=(8 * (i * 7 % 5 + 1), 64, 28 + i, 28))
        for i in range(count)
    ]


def tuner(mode: str, scene: str, seed: int, tuned: list[ConvProblem] | None = None) -> TuneOne:
    """Tunes on a simulated GPU whose noise depends on the seed; notes what it was asked for."""

    def tune_one(problem: ConvProblem) -> Decision:
        if tuned is not None:
            tuned.append(problem)
        timer = simulation.preset(scene, seed * 1009 + sum(problem.input_shape))
        selection = sampling.get(mode).select(timer.candidates, timer, Limits())
        assert selection is not None
        return Decision(problem, Policy(mode), selection)

    return tune_one


def share(
    problems: Sequence[ConvProblem],
    tune_one: TuneOne,
    here: Environment,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 30.0,
) -> list[Decision]:
    """What ``tune`` does once it knows the model's problems; installs nothing."""
    members = group_of(group, timeout_s)
    assert members is not None
    with exchange_with(members, timeout_s) as call:
        ranks = call.handshake(here, {"call": "share"})
        return share_in(call, ranks, problems, tune_one)


def settle(decisions: Sequence[Decision], timeout_s: float = 30.0) -> list[Decision]:
    """What ``agree`` does with the decisions that it finds; installs nothing."""
    members = group_of(None, timeout_s)
    assert members is not None
    with exchange_with(members, timeout_s) as call:
        return agreement.agreed(call, agreement.best(decisions), environment())


def trees(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    return [decision.to_json() for decision in decisions]


def alone(mode: str, scene: str, count: int, seed: int) -> list[str]:
    """What this rank would choose on its own."""
    tune_one = tuner(mode, scene, seed + dist.get_rank())
    return [tune_one(p).selection.winner.candidate.text for p in problems(count)]


def shared(
    mode: str, scene: str, count: int, seed: int, members: Sequence[int] | None = None
) -> tuple[list[ConvProblem], list[dict[str, Any]]]:
    """What this rank has tuned, and what it got; ``members``: with these ranks only."""
    tuned: list[ConvProblem] = []
    tune_one = tuner(mode, scene, seed + dist.get_rank(), tuned)
    group = None
    if members is not None:
        group = dist.new_group(list(members))
        if dist.get_rank() not in members:
            return [], []
    return tuned, trees(share(problems(count), tune_one, environment(), group, 30.0))


def shared_between_unequal(count: int) -> tuple[list[ConvProblem], list[dict[str, Any]]]:
    """Ranks 0 and 2 have another GPU than 1 and 3, and rank 3 a problem more than rank 1."""
    rank = dist.get_rank()
    tuned: list[ConvProblem] = []
    mine = problems(count + 1) if rank == 3 else problems(count)
    tune_one = tuner("race", "aa", rank, tuned)
    here = environment(132 if rank % 2 == 0 else 114)
    return tuned, trees(share(mine, tune_one, here, timeout_s=30.0))


def shared_where_one(
    deed: str, culprit: int, timeout_s: float = 30.0, members: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """At its second problem, or before it comes, one rank misbehaves."""
    rank = dist.get_rank()
    tuned: list[ConvProblem] = []
    decide = tuner("race", "aa", rank, tuned)
    if rank == culprit and deed == "late":
        time.sleep(2 * timeout_s)

    def tune_one(problem: ConvProblem) -> Decision:
        time.sleep(0.0 if rank == culprit else 0.2)  # so that the culprit comes to its second one
        decision = decide(problem)
        if rank == culprit and len(tuned) == 2:
            misbehave(deed, timeout_s)
        return decision

    group = None if members is None else dist.new_group(list(members))
    if members is not None and rank not in members:
        return []
    return trees(share(problems(12), tune_one, environment(), group, timeout_s))


def shared_but_killed(victim: int) -> list[dict[str, Any]]:
    """One rank is killed as soon as all have agreed: what it has put into the store stays."""
    if dist.get_rank() == victim:
        Exchange.leave = lambda *_: misbehave("die", 0.0)  # type: ignore[assignment, method-assign]
    return shared("race", "aa", 6, 0)[1]


def misbehave(deed: str, timeout_s: float) -> None:
    if deed == "raise":
        raise RuntimeError("the GPU is lost")
    if deed == "exit":
        sys.exit(3)
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "stop":  # until another process sends SIGCONT
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "hang":
        time.sleep(2 * timeout_s)


def shared_slowly(count: int, problem_s: float, timeout_s: float) -> list[dict[str, Any]]:
    decide = tuner("race", "quiet", 0)

    def tune_one(problem: ConvProblem) -> Decision:
        time.sleep(problem_s)
        return decide(problem)

    return trees(share(problems(count), tune_one, environment(), timeout_s=timeout_s))


def cause_of(culprit: int) -> str:
    """What the error that this rank gets was raised from."""
    try:
        shared_where_one("raise", culprit)
    except DistributedTuningError as error:
        return repr(error.__cause__)
    return "no error"


def shared_while_killed(silent_s: float) -> list[dict[str, Any]]:
    """A call of about half a second, in a group that is less patient than usual."""
    heartbeat.SILENT_S, heartbeat.BEAT_S = silent_s, silent_s / 10
    return shared_slowly(15, 0.08, 30.0)


def shared_wrongly() -> list[dict[str, Any]]:
    """Rank 1's tuner answers another question."""
    decide = tuner("race", "aa", 0)
    wrong = make("one_dimension")

    def tune_one(problem: ConvProblem) -> Decision:
        time.sleep(0.0 if dist.get_rank() == 1 else 0.1)  # so that rank 1 gets some
        return decide(wrong if dist.get_rank() == 1 else problem)

    return trees(share(problems(12), tune_one, environment(), timeout_s=30.0))


def called_differently(call: str) -> None:
    """Rank 2 agrees while the others share, or tune."""
    if dist.get_rank() == 2:
        settle([])
    elif call == "tune":
        tune(Asking(2), torch.ones(1), timeout_s=30.0)
    else:
        share(problems(4), tuner("race", "aa", 0), environment(), timeout_s=30.0)


def settled(mode: str, scene: str, count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """What this rank had, and what it has then. Rank r knows only problems from number r on."""
    rank = dist.get_rank()
    tune_one = tuner(mode, scene, seed + rank)
    own = [tune_one(problem) for problem in problems(count)[rank:]]
    return trees(own), trees(settle(own))


def settled_late(late: int, after_s: float, timeout_s: float) -> list[Any]:
    """One rank comes later than the others."""
    own = [tuner("race", "aa", dist.get_rank())(problem) for problem in problems(4)]
    if dist.get_rank() == late:
        time.sleep(after_s)
    return trees(settle(own, timeout_s))


def not_a_member() -> None:
    """Every rank shares in a group of rank 0 and 1."""
    group = dist.new_group([0, 1])
    share(problems(2), tuner("race", "aa", 0), environment(), group, 5.0)


def threads() -> list[str]:
    """Of this package, that still run."""
    return [t.name for t in threading.enumerate() if "cudnn_autotune" in t.name]


class Asking(nn.Module):
    """Asks for problems as a model on a GPU does: each gets its choice at its first call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for problem in problems(self.count):
            self.choose(problem)
        return x

    def choose(self, problem: ConvProblem, device: int = 0) -> None:
        limit = _C.benchmark_limit_of_call()
        workspace = ca.get_workspace_limit()
        policy = Policy.of_call(ca.get_sampling(), -1 if workspace is None else workspace, limit)
        decision = untimed(problem, policy, Measurement(OWN_PATH, None, 0))
        choice = Choice(decision, device, "pinned" if problem in ca.pins() else "tuned")
        if policy.probe is not None:
            probing.record(policy.probe, choice)
        else:
            choice_log.record(choice)


def model_tuned(
    counts: Sequence[int],
    culprit: int | None = None,
    mode: str = "race",
    pinned: Sequence[int] = (),
) -> dict[str, Any]:
    """``distributed.tune``, but that the GPU is a simulated one; what it returns and leaves.

    Rank r's model has the first ``counts[r]`` problems; the first of all is pinned on some ranks.
    """
    rank = dist.get_rank()
    ca.forget()
    simulate = tuner("race", "aa", rank)

    def tune_one(problem: ConvProblem, device: int, sampling_mode: str) -> Decision:
        time.sleep(0.02)
        if rank == culprit:
            raise RuntimeError("the GPU is lost")
        return simulate(problem)

    before, tune_problem.tune = tune_problem.tune, tune_one
    result: dict[str, Any] = {"error": None, "decisions": []}
    if rank in pinned:
        ca.pin(problems(1)[0], "aten")
    try:
        with ca.flags("race" if rank else mode):
            model = Asking(counts[rank])
            result["decisions"] = trees(tune(model, torch.ones(1), timeout_s=30.0))
    except DistributedTuningError as error:
        result["error"] = str(error)
    finally:
        tune_problem.tune = before
        ca.unpin()
    return {**result, **standing(max(counts))}


class Laid(Asking):
    """Asks for other problems in channels_last; ``sign`` makes its outputs wrong there."""

    def __init__(self, sign: float) -> None:
        super().__init__(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        is_last = y.is_contiguous(memory_format=torch.channels_last)
        for problem in problems(4)[2:] if is_last else problems(2):
            self.choose(problem)
        return y * self.sign if is_last else y


def laid_out(last_ms: Sequence[float], wrong_on: int | None = None) -> dict[str, Any]:
    """``distributed.tune(memory_format="auto")``; rank r takes ``last_ms[r]`` a step in
    channels_last, and 1 ms contiguous."""
    rank = dist.get_rank()
    simulate = tuner("race", "aa", rank)
    model, x = Laid(-1.0 if rank == wrong_on else 1.0), torch.randn(2, 3, 8, 8)
    timed: list[str] = []

    def time_in_turns(
        programs: dict[str, Callable[[], None]], *_: Any, **more: Any
    ) -> dict[str, float]:
        for name, program in programs.items():
            program()
            timed.append(name)
        return {"contiguous": 1.0, "channels_last": last_ms[rank]}

    with (
        mock.patch.object(tune_problem, "tune", lambda problem, *_: simulate(problem)),
        mock.patch.object(memory_format, "time_in_turns", time_in_turns),
        ca.flags("race"),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        decisions = tune(model, x, timeout_s=30.0, memory_format="auto")
    return {
        "is_last": model.conv.weight.is_contiguous(memory_format=torch.channels_last),
        "problems": [decision.problem for decision in decisions],
        "timed": timed,
        "warned": [str(w.message) for w in warned if "memory_format" in str(w.message)],
    }


def laid_out_but_lost(culprit: int) -> tuple[str, bool]:
    """As :func:`laid_out`, but that a GPU is lost at the end; the error, and whether the model has
    the layout that it had."""
    model = Laid(1.0)
    memory_format.apply(model, torch.channels_last)

    def time_in_turns(*_: Any, **more: Any) -> dict[str, float]:
        if dist.get_rank() == culprit:
            raise RuntimeError("the GPU is lost")
        return {"contiguous": 1.0, "channels_last": 2.0}

    simulate = tuner("race", "aa", 0)
    with (
        mock.patch.object(tune_problem, "tune", lambda problem, *_: simulate(problem)),
        mock.patch.object(memory_format, "time_in_turns", time_in_turns),
        ca.flags("race"),
    ):
        try:
            tune(model, torch.randn(2, 3, 8, 8), timeout_s=30.0, memory_format="auto")
            error = ""
        except DistributedTuningError as failure:
            error = str(failure)
    return error, model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def standing(count: int) -> dict[str, Any]:
    """What would serve the problems on this rank."""
    known = [remembering.find(problem, Policy("race"), 0) for problem in problems(count)]
    return {
        "known": [None if k is None else (k.origin, k.text) for k in known],
        "choices": [(c.problem, c.text) for c in ca.choices() if c.origin == "agreed"],
    }


def agreed(count: int, is_late: bool = False, nonsense_on: int | None = None) -> dict[str, Any]:
    """``agree`` on what each rank has tuned on its own, on the day of its number."""
    rank = dist.get_rank()
    ca.forget()
    measured = Provenance(time=f"2026-01-{rank + 1:02}T12:00:00Z")
    for problem in problems(count):
        decision = tuner("sample_once", "co-tenant", rank)(problem)
        selection = decision.selection
        if rank == nonsense_on:  # what a strategy of the user's may bring, and it wins
            evidence = replace(selection.evidence, regret_bound=-0.5)
            selection = replace(selection, total_samples=10**6, evidence=evidence)
        policy = replace(decision.policy, mode="race")
        own = replace(decision, policy=policy, selection=selection, provenance=measured)
        choice_log.record(Choice(own, 0))
    result: dict[str, Any] = {"error": None, "own": [c.text for c in ca.choices()]}
    if is_late and rank == 3:
        time.sleep(2.0)
    try:
        result["decisions"] = trees(agree(timeout_s=1.0 if is_late else 30.0))
    except DistributedTuningError as error:
        result["error"] = str(error)
    return {**result, **standing(count)}


def sent_badly(call: str, culprit: int, message: str, bad: Any) -> list[dict[str, Any]]:
    """One rank sends ``bad`` in place of its messages whose name begins so. ``bad`` may be a
    function of what it would send."""
    rank = dist.get_rank()
    put = Exchange.put

    def put_badly(self: Exchange, name: str, tree: Any) -> None:
        if rank == culprit and name.startswith(message):
            tree = bad(tree) if callable(bad) else bad
        put(self, name, tree)

    decide = tuner("race", "aa", rank)

    def tune_one(problem: ConvProblem) -> Decision:
        time.sleep(0.0 if rank == culprit else 0.1)  # so that the culprit gets some
        return decide(problem)

    with mock.patch.object(Exchange, "put", put_badly):
        if call == "share":
            return trees(share(problems(12), tune_one, environment()))
        # The culprit wins them all, as the only one that knows them.
        return trees(settle([decide(p) for p in problems(6)] if rank == culprit else []))


def torn(tree: list[Any]) -> list[Any]:
    """The message of a decision without its end."""
    return [tree[0], tree[1][:-9]]


def newer(tree: list[Any]) -> list[Any]:
    """The message of a decision as a later version might write it, with the right checksum."""
    line = tree[1].encode()
    name = codec.name_in(line, codec.seed(environment()))
    assert name is not None
    return [tree[0], codec.sealed(name, b'{"form":9}', environment()).decode()]


def misplaced(tree: list[Any]) -> list[Any]:
    """The message of a decision on what nobody has asked for."""
    other = tuner("race", "aa", 0)(make("one_dimension"))
    return [tree[0], codec.encode(other, environment()).decode()]


def shared_in_version(rank: int, version: str) -> list[dict[str, Any]]:
    """One rank has another version of the package."""
    if dist.get_rank() != rank:
        return shared("race", "aa", 4, 0)[1]
    with mock.patch.object(exchange.versions, "version", return_value=version):
        return shared("race", "aa", 4, 0)[1]


def shared_by_threads(count: int) -> list[list[dict[str, Any]]]:
    """Several threads of each rank share the same problems at once."""

    def run(_: int) -> list[dict[str, Any]]:
        return shared("race", "aa", 6, 0)[1]

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def settled_within_another_call(culprit: int) -> list[dict[str, Any]]:
    """One rank agrees while it tunes."""
    decide = tuner("race", "aa", 0)

    def tune_one(problem: ConvProblem) -> Decision:
        if dist.get_rank() == culprit:
            settle([])
        time.sleep(0.1)
        return decide(problem)

    return trees(share(problems(12), tune_one, environment()))


def settled_beside_another_thread(timeout_s: float) -> str:
    """A thread of this rank tunes for longer than the other thread's call may wait."""
    has_begun, may_end = threading.Event(), threading.Event()

    def tune_one(problem: ConvProblem) -> Decision:
        has_begun.set()
        may_end.wait(30.0)
        return tuner("race", "aa", 0)(problem)

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(share, problems(dist.get_world_size()), tune_one, environment())
        has_begun.wait(30.0)
        try:
            settle([], timeout_s)
        except DistributedTuningError as error:
            return str(error)
        finally:
            may_end.set()
            assert len(found.result()) == dist.get_world_size()
    return "no error"


class AsksMoreInTraining(Asking):
    """Asks for two problems more where gradients are on."""

    def forward(self, x: Tensor) -> Tensor:
        for problem in problems(self.count + 2 * torch.is_grad_enabled()):
            self.choose(problem)
        return x


def tuned_with(count: int, given: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    """``distributed.tune`` with these arguments; the budgets that its searches got (None: a search
    without one), and what it returns. A search takes 0.1 s of the clock, and nothing else does."""
    ca.forget()
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=time.perf_counter)
    simulate = tuner("race", "quiet", 0)
    budgets: list[float | None] = []

    def tune_one(problem: ConvProblem, *_: Any) -> Decision:
        budgets.append(None)
        return simulate(problem)

    def race(calls: dict[ConvProblem, int], device: int, mode: str, left_s: float) -> Any:
        nonlocal now_s
        budgets.append(left_s)
        now_s += min(left_s, 0.1)
        time.sleep(0.02)  # so that the other rank gets some
        return [simulate(problem) for problem in calls]

    result: dict[str, Any] = {"error": None, "decisions": []}
    with (
        ca.flags(mode),
        mock.patch.object(tune_problem, "tune", tune_one),
        mock.patch("cudnn_autotune.distributed.model.tune_problems", race),
        mock.patch("cudnn_autotune.distributed.model.time", clock),
    ):
        if isinstance(given.get("budget_s"), list):
            given["budget_s"] = given["budget_s"][dist.get_rank()]
        try:
            made = tune(AsksMoreInTraining(count), torch.ones(1), timeout_s=30.0, **given)
            result["decisions"] = trees(made)
        except DistributedTuningError as error:
            result["error"] = str(error)
    return {**result, "budgets": budgets}
