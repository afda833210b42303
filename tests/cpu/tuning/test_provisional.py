"""Choices that were made without what a later search may have: they serve, and are not kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.conv.problems import make
from support.kernels import user_kernels
from support.tuning.made_up_plans import plan_of

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.distributed import agreement
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.implementing import isolated_run
from cudnn_autotune.implementing import registering as implementing
from cudnn_autotune.implementing.isolated_run import Outcome
from cudnn_autotune.online.tuner import OnlineCommitter, Prepared
from cudnn_autotune.sampling import model_race
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers import gpu_timer, lacking
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.lacking import NOTHING, Lacking, is_passing
from cudnn_autotune.timers.measuring import Operands, operands
from cudnn_autotune.tuning import checking, choice_log, miss, remembering
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.gpu_searches import GpuSearches

pytestmark = [pytest.mark.search, pytest.mark.usefixtures("store")]

PROBLEM = ca.ConvProblem(
    "fprop", (2, 16, 6, 5), (8, 16, 1, 1), dtype=torch.float16, memory_format=torch.channels_last
)
SHORT = Lacking(memory_bytes=1 << 30, left_out=12)
MINE = replace(OWN_PATH, text="mine@1")
LEFT_OUT = "12 candidates were left out because memory was short"


@pytest.fixture(autouse=True)
def data() -> Operands:
    return operands(PROBLEM, "cpu")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free memory, in bytes, which is a GPU's elsewhere; at first there is none."""
    free = [0]
    monkeypatch.setattr(lacking, "_has_room", lambda size, device: size <= free[-1])
    return free


def ranking(*candidates: ca.expert.Candidate) -> Selection:
    entries = tuple(Measurement(c, 1.0 + i, 9) for i, c in enumerate(candidates))
    return Selection(entries, 9 * len(entries), Evidence("fastest"))


def ask(
    data: Operands,
    lacks: Lacking,
    selection: Selection | None,
    serving: _C.Plan | None = None,
    mode: str = "race",
    more: tuple[_C.Plan, ...] = (),
) -> tuple[_C.Plan, bool]:
    """As C++ asks for the choice of the problem. A search, should one be made, ends with this
    selection, has built these plans besides PyTorch's, and lacks this."""
    plans = {text: _C.build_plan(PROBLEM.native(), text, 0) for text in ("aten", "matmul")}
    plans |= {plan.text: plan for plan in more}
    timer: Any = SimpleNamespace(plans=plans, lacking=lambda: lacks, broken_off=lambda why: None)
    with miss.searched(PROBLEM, selection, timer):
        plan, trial, is_provisional, afterwards = miss.choose(
            PROBLEM.native(), mode, -1, 0, 0, *data, serving=serving
        )
    assert trial is None
    if afterwards is not None:
        afterwards()
    return plan, is_provisional


def made() -> Choice:
    (choice,) = ca.choices()
    return choice


# What passes


PASSING = (
    "CUDA out of memory. Tried to allocate 20.00 MiB.",
    "loading k: CUDA_ERROR_OUT_OF_MEMORY (out of memory)",
    "compiling k: NVRTC_ERROR_OUT_OF_MEMORY",
    "cuDNN: building a plan failed (CUDNN_STATUS_ALLOC_FAILED)",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "std::bad_alloc",
    "OSError: [Errno 28] No space left on device",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
)
LASTING = (
    "",
    "cuDNN: finding eng3 failed (CUDNN_STATUS_NOT_SUPPORTED)",
    "cuDNN: building eng3 failed (CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH)",
    "compiling k: NVRTC_ERROR_COMPILATION\nk.cu(3): error: identifier is undefined",
    "no matrix product computes it",
)


@pytest.mark.parametrize("error", [*PASSING, *LASTING])
def test_what_is_short_now_may_be_there_later_and_what_is_not_supported_never(error: str) -> None:
    assert is_passing(error) == (error in PASSING)


@pytest.mark.parametrize("text", ["eng987", "nonsense", "eng67:KERNEL_CFG=987", "mine@1:a=1"])
def test_no_candidate_that_does_not_exist_passes(text: str) -> None:
    """As cuDNN and this package say so of one."""
    search = open_search(make("resnet_fp16_nhwc"), "h200")
    ((plan, why),) = search.build_many([text], 1)
    assert plan is None
    assert why
    assert not is_passing(why)


def test_it_says_what_was_lacking() -> None:
    assert not NOTHING
    assert str(NOTHING) == ""
    assert str(SHORT) == LEFT_OUT
    assert str(NOTHING.and_memory(5)) == "1 candidate was left out because memory was short"
    assert NOTHING.and_memory(5).and_memory(3).and_memory(9).memory_bytes == 3
    assert str(Lacking(memory_bytes=1)) == "the search ran out of memory"
    both = replace(SHORT.and_build(), check=True)
    assert str(both).split("; ") == [
        LEFT_OUT,
        "1 candidate was not built, for a reason that may pass",
        "its output could not be compared with a reference",
    ]


# What is provisional


def test_it_serves_and_says_so_and_is_not_kept(
    data: Operands, store: ca.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plan, is_provisional = ask(data, SHORT, ranking(MATMUL, OWN_PATH))
    assert (plan.text, is_provisional) == ("matmul", True)
    choice = made()
    assert choice.provisional == LEFT_OUT
    assert choice.selection.evidence.provisional == LEFT_OUT
    assert choice.decision.selection.evidence.provisional == LEFT_OUT
    assert f"provisional: {LEFT_OUT}" in caplog.text
    assert list(store) == []
    assert remembering.find(PROBLEM, Policy("race"), 0) is None


def test_another_thread_is_served_by_it_without_a_search(data: Operands, room: list[int]) -> None:
    ask(data, SHORT, ranking(MATMUL, OWN_PATH))
    plan, is_provisional = ask(data, NOTHING, ranking(OWN_PATH, MATMUL), serving=None)
    assert (plan.text, is_provisional) == ("matmul", True)


def test_with_room_it_is_tuned_again_and_kept(
    data: Operands, room: list[int], store: ca.Store
) -> None:
    first, _ = ask(data, SHORT, ranking(OWN_PATH, MATMUL))
    room.append(SHORT.memory_bytes)
    heard: list[Choice] = []
    with ca.on_decision(heard.append):
        plan, is_provisional = ask(data, NOTHING, ranking(MATMUL, OWN_PATH), first)
    assert (plan.text, is_provisional) == ("matmul", False)
    assert heard == [made()]
    assert made().provisional == ""
    assert [decision.selection.winner.candidate for decision in store] == [MATMUL]


def test_a_search_that_ran_out_of_memory_again_leaves_what_serves(
    data: Operands, room: list[int]
) -> None:
    """PyTorch's own path serves, from the first search that ran out of memory on."""
    first, is_provisional = ask(data, Lacking(memory_bytes=5), None)
    assert (first.text, is_provisional) == ("aten", True)
    assert made().provisional == "the search ran out of memory"
    room.append(5)
    heard: list[Choice] = []
    with ca.on_decision(heard.append):
        again, is_provisional = ask(data, Lacking(memory_bytes=5), None, first)
    assert (again.text, is_provisional) == ("aten", True)
    assert heard == []
    plan, is_provisional = ask(data, NOTHING, ranking(MATMUL, OWN_PATH), again)
    assert (plan.text, is_provisional) == ("matmul", False)


def test_a_build_that_failed_is_tried_again(data: Operands, store: ca.Store) -> None:
    first, is_provisional = ask(data, Lacking(not_built=1), ranking(OWN_PATH))
    assert is_provisional
    plan, is_provisional = ask(data, NOTHING, ranking(MATMUL, OWN_PATH), first)
    assert (plan.text, is_provisional) == ("matmul", False)
    assert len(list(store)) == 1


def test_what_could_not_be_compared_is_compared_in_a_later_call(
    data: Operands, store: ca.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same engine is final then, and kept with its error."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for random operands")

    x, w, y = data
    unfit = (torch.full_like(x, torch.inf), w, y)
    with monkeypatch.context() as context:
        context.setattr(checking, "telling_operands", no_memory)
        first, is_provisional = ask(unfit, NOTHING, ranking(MATMUL, OWN_PATH))
        assert is_provisional
        assert made().relative_error is None
        assert "could not be compared" in made().provisional
        assert list(store) == []
        again, is_provisional = ask(unfit, NOTHING, ranking(OWN_PATH), first)
        assert again is first
        assert is_provisional
    plan, is_provisional = ask(data, NOTHING, ranking(OWN_PATH), first)
    assert plan is first
    assert not is_provisional
    (kept,) = store
    assert kept.selection.winner.candidate == MATMUL
    assert kept.relative_error is not None
    assert made().provisional == ""


def test_what_turns_out_wrong_is_tuned_again(data: Operands, store: ca.Store) -> None:
    x, w, y = data
    first, _ = ask((torch.full_like(x, torch.inf), w, y), NOTHING, ranking(MATMUL, OWN_PATH))
    # In another layout than the problem says, the product's rows lie elsewhere: a wrong output.
    elsewhere = torch.empty(y.shape, dtype=y.dtype)
    plan, is_provisional = ask((x, w, elsewhere), NOTHING, ranking(MATMUL, OWN_PATH), first)
    assert (plan.text, is_provisional) == ("aten", False)
    assert dict(made().rejected).keys() == {"matmul"}


def test_a_final_decision_of_another_process_takes_its_place(
    data: Operands, room: list[int], store: ca.Store
) -> None:
    first, _ = ask(data, SHORT, ranking(OWN_PATH, MATMUL))
    store.add([Decision(PROBLEM, Policy("race"), ranking(MATMUL, OWN_PATH), 1e-4)])
    plan, is_provisional = ask(data, SHORT, ranking(OWN_PATH), first)
    assert (plan.text, is_provisional) == ("matmul", False)
    assert made().origin == "store"


@pytest.mark.parametrize("lacks", [NOTHING, SHORT])
def test_ranks_that_agree_leave_it_out(lacks: Lacking, data: Operands) -> None:
    ask(data, lacks, ranking(MATMUL, OWN_PATH))
    _, own = agreement._tuned_here()
    assert list(own.values()) == ([] if lacks else [made().decision])


def test_ranks_that_tune_a_model_share_it_and_do_not_keep_it(
    data: Operands, store: ca.Store
) -> None:
    ask(data, SHORT, ranking(MATMUL, OWN_PATH))
    decision = made().decision
    remembering.install([decision], 0)
    assert list(store) == []
    known = remembering.find(PROBLEM, Policy("race"), 0)
    assert known.origin == "agreed"
    assert known.provisional == LEFT_OUT
    # Ranks that looked again would choose differently.
    plan, is_provisional = ask(data, NOTHING, ranking(OWN_PATH))
    assert (plan.text, is_provisional) == ("matmul", False)


def test_what_another_program_has_stored_all_the_same_is_no_decision(store: ca.Store) -> None:
    selection = ranking(MATMUL, OWN_PATH)
    selection = replace(selection, evidence=replace(selection.evidence, provisional=LEFT_OUT))
    store.add([Decision(PROBLEM, Policy("race"), selection, 1e-4)])
    assert remembering.find(PROBLEM, Policy("race"), 0) is None


@pytest.mark.parametrize("lacks", [NOTHING, SHORT])
def test_what_a_models_race_decided_provisionally_is_raced_again(
    lacks: Lacking, data: Operands
) -> None:
    selection = ranking(MATMUL, OWN_PATH)
    remarks = (model_race._TOGETHER,)
    ask(data, lacks, replace(selection, evidence=replace(selection.evidence, remarks=remarks)))
    searches = GpuSearches(0, "race", retune=False)
    assert searches.known(PROBLEM) == (None if lacks else made().decision)


@pytest.mark.parametrize("lacks", [NOTHING, SHORT, Lacking(not_built=2)])
def test_a_trial_is_provisional_for_what_its_calls_lacked(lacks: Lacking, store: ca.Store) -> None:
    decision = Decision(PROBLEM, Policy("online"), Selection((Measurement(OWN_PATH, None, 0),), 0))
    prepared = Prepared(lacking=lacks)
    prepared.checks.errors["matmul"] = 1e-4
    committer = OnlineCommitter(Choice(decision, 0), prepared, choice_log.generation(PROBLEM))
    assert committer.commit(ranking(MATMUL, OWN_PATH)) is bool(lacks)
    assert made().provisional == str(lacks)
    assert len(list(store)) == (0 if lacks else 1)
    # Another thread's trial of the problem decides itself.
    assert committer.chosen_elsewhere == (None if lacks else "matmul")


# A function of Python's that raises


def raising(error: BaseException) -> _C.Plan:
    def run(*tensors: object) -> None:
        raise error

    return plan_of("mine@1", PROBLEM, run)


def test_one_that_fails_when_it_is_checked_is_not_wrong(data: Operands, store: ca.Store) -> None:
    plans = (raising(ValueError("not today")),)
    found, is_provisional = ask(data, NOTHING, ranking(MINE, MATMUL, OWN_PATH), more=plans)
    assert (found.text, is_provisional) == ("matmul", False)
    assert made().rejected == ()
    failed = made().selection.ranking[0]
    assert failed.candidate == MINE
    assert (failed.time_ms, failed.eliminated) == (None, "failed: mine@1: ValueError: not today")
    (kept,) = store
    assert [entry.candidate.text for entry in kept.selection.ranking] == ["matmul", "aten"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError(), RuntimeError("out of memory")]
)
def test_one_that_fails_for_a_reason_that_may_pass_makes_the_choice_provisional(
    error: Exception, data: Operands, store: ca.Store
) -> None:
    plans = (raising(error),)
    found, is_provisional = ask(data, NOTHING, ranking(MINE, MATMUL, OWN_PATH), more=plans)
    assert (found.text, is_provisional) == ("matmul", True)
    assert made().rejected == ()
    assert list(store) == []


def test_an_interrupt_ends_a_search(data: Operands) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(data, NOTHING, ranking(MINE, OWN_PATH), more=(raising(KeyboardInterrupt()),))


def refusals(error: BaseException) -> tuple[str, Lacking]:
    """What a timer says of a candidate that raises this, and what its search lacked."""
    timer = object.__new__(GpuTimer)
    x, w, y = operands(PROBLEM, "cpu")
    timer.__dict__.update(
        _ask_refusal=checking.refusal(PROBLEM, (x, w, y)), _refusals={}, _wanted={}, _seen={},
        _errors={}, _not_built=set(), plans={"mine@1": raising(error)}, _device=x.device,
        operands=(x, w, y),
    )  # fmt: skip
    with mock.patch.object(gpu_timer, "available_bytes", return_value=0):
        return timer._refusal(MINE), timer.lacking()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError("no room")])
def test_a_search_that_leaves_one_out_for_want_of_memory_is_provisional(
    error: Exception,
) -> None:
    why, lacks = refusals(error)
    assert why
    assert lacks.memory_bytes > 0
    assert lacks.left_out == 1


def test_a_search_that_leaves_one_out_because_it_fails_is_not() -> None:
    why, lacks = refusals(ValueError("not today"))
    assert why == "it fails: mine@1: ValueError: not today"
    assert lacks == NOTHING


# Kernels that cannot be built


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """An implementation that keeps what it compiles in the last of these files, the first of which
    is on a full disk. What it has written to so far comes before it."""
    files = [Path("/dev/full")]
    h200 = replace(gpu_of("h200"), device=None)
    monkeypatch.setattr(implementing, "gpu_of", lambda device: h200)
    monkeypatch.setattr(isolated_run, "run_elsewhere", lambda _, some, *__: [Outcome()] * len(some))
    builds.clear()

    def build(problem: ca.ConvProblem, settings: str) -> Any:
        builds.append(files[-1])
        files[-1].write_bytes(b"code")
        return user_kernels.build(problem, "right")

    ca.register_implementation("mine", version="1", supports=user_kernels.always)(build)
    yield files
    ca.unregister_implementation("mine")


builds: list[Path] = []


def test_what_a_full_disk_keeps_from_being_built_is_built_alone_before_a_search(
    data: Operands, store: ca.Store, compiles: list[Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    search = open_search(PROBLEM, "h200")
    with pytest.raises(_C.PlanError, match="No space left on device") as failure:
        _C.build_plan(PROBLEM.native(), "mine@1", 0)
    timer = object.__new__(GpuTimer)
    timer.__dict__.update(plans={}, _wanted={}, _not_built=set(), _search=search)
    timer._keep(["mine@1"], [(None, str(failure.value))])
    lacks = timer.lacking()
    assert lacks == NOTHING.and_build("mine@1")
    plan, is_provisional = ask(data, lacks, ranking(OWN_PATH))
    searches: list[object] = []
    builds.clear()
    with monkeypatch.context() as patch:
        patch.setattr(miss, "_search", lambda *args, **_: searches.append(args))
        for _ in range(5):
            plan, is_provisional = ask(data, lacks, ranking(OWN_PATH), plan)
            assert (plan.text, is_provisional) == ("aten", True)
    assert (searches, builds) == ([], [Path("/dev/full")] * 5)
    compiles.append(tmp_path / "kernel")
    mine = _C.build_plan(PROBLEM.native(), "mine@1", 0)
    found, is_provisional = ask(data, NOTHING, ranking(MINE, OWN_PATH), plan, more=(mine,))
    assert (found.text, is_provisional) == ("mine@1", False)
    assert len(list(store)) == 1


def test_one_that_still_fails_when_it_runs_is_not_searched_for(
    data: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it compiles at its first run finds no room either."""
    one, real = raising(OSError(28, "No space left on device")), _C.build_plan
    monkeypatch.setattr(_C, "build_plan", lambda n, t, d: one if t == MINE.text else real(n, t, d))
    first, is_provisional = ask(data, NOTHING, ranking(MINE, OWN_PATH), more=(one,))
    assert (first.text, is_provisional) == ("aten", True)
    assert made().lacking == NOTHING.and_build("mine@1")
    monkeypatch.setattr(miss, "_search", None)
    again, is_provisional = ask(data, NOTHING, None, first)
    assert (again.text, is_provisional) == ("aten", True)


# What a budget cut short


def cut_short(budget_ms: float | None) -> Decision:
    selection = ranking(MATMUL, OWN_PATH)
    selection = replace(selection, evidence=replace(selection.evidence, budget_ms=budget_ms))
    return Decision(PROBLEM, Policy("race"), selection, 1e-4)


@pytest.mark.parametrize(
    ("was_ms", "budget_ms", "serves"),
    [
        (50.0, None, False),
        (50.0, 60.0, False),
        (50.0, 50.0, True),
        (50.0, 20.0, True),
        (None, None, True),
        (None, 20.0, True),
    ],
)
def test_what_a_budget_cut_short_serves_no_larger_one(
    was_ms: float | None, budget_ms: float | None, serves: bool, store: ca.Store
) -> None:
    store.add([cut_short(was_ms)])
    ca.set_budget_ms(budget_ms)
    assert (remembering.find(PROBLEM, Policy("race"), 0) is not None) is serves


def test_behind_what_a_budget_cut_short_a_shipped_decision_is_found(
    store: ca.Store, tmp_path: Path
) -> None:
    shipped = Store(tmp_path / "shipped", store.environment)
    shipped.add([cut_short(None)])
    store.add([cut_short(5.0)])
    ca.set_store(store.path, mode="read_write", shipped=[shipped.path])
    assert remembering.find(PROBLEM, Policy("race"), 0).selection.evidence.budget_ms is None


def test_a_larger_budget_replaces_what_a_smaller_one_cut_short(
    data: Operands, store: ca.Store
) -> None:
    store.add([cut_short(5.0)])
    ask(data, NOTHING, ranking(OWN_PATH, MATMUL))
    (kept,) = store
    assert kept.selection.winner.candidate == OWN_PATH
    assert kept.selection.evidence.budget_ms is None
