"""Plans are made before a call asks for them, and only what is asked for is used.

The GPU is one that is not here, and plans of all engines are kept, as in test_kept_plans.py.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.conv.problems import make
from support.processes.subprocesses import python
from support.store.decisions import H200
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.core.background import BackgroundThreads
from cudnn_autotune.engines import devices
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import kept_plans
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Layered, Store
from cudnn_autotune.tuning import prefetching, serving
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.prefetching import Reader

pytestmark = pytest.mark.search

GPU = devices.load("h200")
PROBLEM = make("resnet_fp16_nhwc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    _C.keep_plans("", kept_plans.find, kept_plans.keep)
    ca.set_store(tmp_path, mode="read_write")
    yield tmp_path
    prefetching.clear()
    _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)


@functools.cache
def candidates() -> list[ca.expert.Candidate]:
    found = ca.expert.candidates(PROBLEM, device="h200")
    # Those of an H200 that is here would be compiled.
    return [replace(c, behavior_notes=("RUNTIME_COMPILATION",)) for c in found]


def texts(count: int) -> list[str]:
    return [candidate.text for candidate in candidates()[:count]]


def start(wanted: Sequence[str], *, may_compile: bool = True) -> list[prefetching.Built]:
    return prefetching.start([(PROBLEM, t) for t in wanted], GPU, may_compile=may_compile)


def take(text: str, problem: ca.ConvProblem = PROBLEM) -> _C.Plan | None:
    return prefetching.take(problem.native(), text, GPU)


def of_size(number: int) -> ca.ConvProblem:
    return make("resnet_fp16_nhwc", input_shape=(1 + number, 64, 56, 56))


def decision(
    problem: ca.ConvProblem, candidate: ca.expert.Candidate, mode: str = "race"
) -> Decision:
    selection = Selection((Measurement(candidate, 1.0, 9), Measurement(OWN_PATH, 2.0, 9)), 18)
    return Decision(problem, Policy(mode), selection, 1e-4)


# Plans that wait


def test_a_plan_is_taken_once() -> None:
    wanted = texts(6)
    begun = start(wanted)
    assert len(begun) == 6
    for text in wanted:
        plan = take(text)
        if plan is None:  # its turn had not come
            continue
        assert plan.text == text
        assert take(text) is None
    wait(begun)
    for _ in range(2):
        start(wanted[:1])[0].result()
        plan = take(wanted[0])
        assert plan is not None
    assert plan.is_read_back


def test_nothing_is_compiled_unless_it_may_be() -> None:
    text, other = texts(2)
    open_search(PROBLEM, "h200").build(text)
    before = kept_plans.counts()
    wait(start([text, other], may_compile=False))
    assert take(text).is_read_back
    assert take(other) is None
    assert kept_plans.counts() == {**before, "read": before["read"] + 1}


def test_what_was_not_kept_is_compiled_once_it_may_be() -> None:
    (text,) = texts(1)
    wait(start([text], may_compile=False))
    assert start([text], may_compile=False) == []
    begun = start([text])
    assert len(begun) == 1
    wait(begun)
    assert start([text]) == []
    assert not take(text).is_read_back


def test_a_config_that_does_not_build_is_left_to_the_caller() -> None:
    begun = start(["eng987", "nonsense"])
    wait(begun)
    assert all(isinstance(built.exception(), ca.CudnnError) for built in begun)
    assert take("eng987") is None
    assert take("nonsense") is None


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_MOST_WAITING", 4)
    wanted = texts(12)
    begun = [built for text in wanted for built in start([text])]
    wait(begun)
    assert [take(text) is not None for text in wanted] == [False] * 8 + [True] * 4


# What takes them


def served(known: Choice, limit: int | None = None) -> _C.Plan:
    search = functools.partial(open_search, known.problem, "h200")
    limited = replace(known.decision.policy, workspace=limit)
    known = replace(known, decision=replace(known.decision, policy=limited))
    return serving.built(known, search)


def choice(candidate: ca.expert.Candidate, problem: ca.ConvProblem = PROBLEM) -> Choice:
    return Choice(decision(problem, candidate), GPU, "store")  # type: ignore[arg-type]


def test_serving_takes_the_plan_and_verifies_it() -> None:
    one = next(c for c in candidates() if c.workspace_bytes > 0)
    (built,) = start([one.text])
    wait([built])
    assert served(choice(one)) is built.result()
    (built,) = start([one.text])
    wait([built])
    with pytest.raises(serving.UnfitError, match="not allowed"):
        served(choice(one), one.workspace_bytes - 1)


# What is read ahead


@pytest.fixture
def layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Layered:
    """A store of an H200, as if it were here."""
    found = Layered(Store(folder / "h200", H200))
    monkeypatch.setattr(store_settings, "layers", lambda device: found)
    return found


def test_plans_around_a_decision_are_read_back(layers: Layered) -> None:
    one, other = candidates()[:2]
    decisions = [decision(of_size(n), one if n % 2 else other) for n in range(10)]
    layers.add(decisions)
    for known in decisions[:9]:  # that of the last is not kept
        text = known.selection.winner.candidate.text
        open_search(known.problem, "h200").build(text)
    before = kept_plans.counts()
    prefetching.read_ahead(choice(one, decisions[3].problem))
    wait(list(prefetching._waiting.values()))
    for number, known in enumerate(decisions):
        plan = take(known.selection.winner.candidate.text, known.problem)
        assert (plan is not None) is (number not in (3, 9)), number
        assert plan is None or plan.is_read_back
    assert kept_plans.counts() == {**before, "read": before["read"] + 8}
    prefetching.read_ahead(choice(one, decisions[5].problem))
    assert not prefetching._waiting  # once


@pytest.mark.parametrize("origin", ["tuned", "agreed", "pinned"])
def test_only_a_store_tells_what_comes_next(layers: Layered, origin: str) -> None:
    layers.add([decision(of_size(n), candidates()[0]) for n in range(4)])
    prefetching.read_ahead(replace(choice(candidates()[0], of_size(1)), origin=origin))
    assert not prefetching._waiting


def test_without_threads_the_calls_build_their_plans(
    layers: Layered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    layers.add([decision(of_size(n), candidates()[0]) for n in range(4)])
    # A thread that another test has begun may still run.
    monkeypatch.setattr(prefetching, "_READING", BackgroundThreads(4))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    prefetching.read_ahead(choice(candidates()[0], of_size(1)))
    assert not prefetching._waiting


def test_reading_ahead_is_bounded_and_follows_the_calls(folder: Path) -> None:
    one = candidates()[0]
    decisions = [decision(of_size(n), one) for n in range(200)]
    layers = Layered(Store(folder / "h200", H200))
    layers.add(decisions)
    reader = Reader(layers)
    seen: list[ca.ConvProblem] = []
    # Blocks of 64: 100 lies in the second half of one, so that the next is read with it.
    for place, most in ((100, 2), (100, 0), (70, 0), (130, 0), (180, 1), (199, 0), (0, 1)):
        around = reader.around(decisions[place])
        assert len(around) <= most * 64
        assert bool(around) is bool(most)
        seen += [d.problem for d in around]
    # Each once, and all but those that were served when their block was read.
    assert len(seen) == len(set(seen)) == 200 - 2
    assert reader.around(decision(of_size(999), one)) == []


def test_only_what_the_call_could_be_followed_by_is_read(folder: Path) -> None:
    compiled = candidates()[0]
    random = replace(candidates()[1], numerical_notes=("NONDETERMINISTIC",))
    layers = Layered(Store(folder / "h200", H200))
    first = decision(of_size(0), compiled)
    layers.add(
        [
            first,
            decision(of_size(1), replace(compiled, behavior_notes=())),  # is built in no time
            decision(of_size(2), compiled, "sustained"),
            decision(of_size(3), random),
            decision(of_size(4), compiled),
            decision(of_size(5), OWN_PATH),
        ]
    )

    def sizes(served: Decision) -> list[int]:
        return [d.problem.input_shape[0] - 1 for d in Reader(layers).around(served)]

    assert sizes(first) == [3, 4]
    strict = first.restricted_to(True, None)
    assert strict is not None
    assert sizes(strict) == [4]
    assert all(d.problem.deterministic for d in Reader(layers).around(strict))


# Processes


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not() -> None:
    start(texts(40))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(sum(take(text) is not None for text in texts(40)))
    assert os.waitpid(child, 0)[1] == 0


EXIT = """
import atexit, sys
from support.conv.problems import make
from cudnn_autotune import _C
from cudnn_autotune.engines import devices
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning import prefetching
_C.keep_plans("", kept_plans.find, kept_plans.keep)
atexit.register(lambda: print(kept_plans.counts()["compiled"]))  # is called after the threads end
problems = [make("resnet_fp16_nhwc", input_shape=(1 + n, 64, 56, 56)) for n in range(250)]
begun = prefetching.start([(p, "eng0") for p in problems], devices.load("h200"), may_compile=True)
print(len(begun))
"""


def test_a_process_that_exits_meanwhile_does_not_finish_the_work() -> None:
    done = python("-c", EXIT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    begun, built = map(int, done.stdout.split())
    assert begun == 250
    assert built < 125


def test_nobody_waits_for_what_an_exit_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(threading.main_thread()), "is_alive", lambda thread: False)
    begun = start(texts(9))
    done, waiting = wait(begun, timeout=60)
    assert len(done) == 9
    assert not waiting
    assert all(built.cancelled() for built in begun)
    assert take(texts(1)[0]) is None


def test_prefetch_of_a_model_that_is_not_served_here() -> None:
    model = nn.Sequential(ca.Conv2d(3, 4, 3))
    found = ca.prefetch(model, torch.randn(1, 3, 8, 8))
    assert found == ca.Prefetched(problems=0, known=0, read_back=0, compiled=0)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        ca.prefetch(lambda x: x, torch.randn(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"inputs must be .* Sequential\.forward\(input.*missing"):
        ca.prefetch(model)
