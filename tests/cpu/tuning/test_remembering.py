"""What is known before tuning, and what is kept afterwards: pins, agreements, the store."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.subprocesses import evaluate_forked
from support.simulation import candidate
from support.store.decisions import under
from support.store.stored import layer, simulation

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.timers import measuring
from cudnn_autotune.tuning import deferred, remembering, tune_problem
from cudnn_autotune.tuning.choice import Choice

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
FAST = dataclasses.replace(
    candidate("eng1", 1, 4096), heuristic_mode="A", numerical_notes=("NONDETERMINISTIC",)
)
SLOW = candidate("eng2", 2)
SELECTION = Selection(
    (Measurement(FAST, 1.0, 9), Measurement(SLOW, 1.2, 9), Measurement(OWN_PATH, 1.5, 9)),
    27,
    Evidence("fastest"),
)


def choice(
    chosen: int = 0, origin: str = "tuned", problem: ca.ConvProblem = PROBLEM, **changes: Any
) -> Choice:
    """A choice whose winner is this one of ``SELECTION``."""
    first = SELECTION.ranking[chosen]
    others = [entry for entry in SELECTION.ranking if entry is not first]
    fields: dict[str, Any] = {
        "selection": dataclasses.replace(SELECTION, ranking=(first, *others)),
        "relative_error": 1e-3,
        "provenance": Provenance.now(""),
        **changes,
    }
    policy = Policy(fields.pop("sampling", "auto"), fields.pop("workspace_limit", None))
    return Choice(Decision(problem, policy, **fields), 0, origin, tuning_ms=5.0)


DETERMINISTIC = dataclasses.replace(PROBLEM, deterministic=True)


def find(
    problem: ca.ConvProblem = PROBLEM, sampling: str = "auto", limit: int | None = None
) -> tuple[str, str] | None:
    known = remembering.find(problem, Policy(sampling, limit), 0)
    return None if known is None else (known.text, known.origin)


@pytest.mark.usefixtures("folder")
def test_what_was_tuned_is_known_afterwards() -> None:
    assert find() is None
    remembering.commit(choice())
    assert find() == ("eng1", "store")
    known = remembering.find(PROBLEM, Policy("auto"), 0)
    assert known.decision.relative_error == 1e-3
    assert known.decision.provenance.torch == torch.__version__
    assert known.decision.selection.winner == SELECTION.winner


def test_what_is_put_off_is_stored_afterwards(folder: Path) -> None:
    """In its order, and what is put off within by the outermost."""
    with deferred.put_off() as changes:
        remembering.commit(choice())
        with deferred.put_off() as inner:
            deferred.change(lambda: ca.get_store().reject(next(iter(ca.get_store()))))
        assert (find(), inner, list(folder.iterdir())) == (None, [], [])
    assert find() is None
    deferred.make_all(changes)
    assert find() == ("eng2", "store")


def test_what_was_tuned_before_an_error_is_stored_all_the_same(folder: Path) -> None:
    def fails() -> None:
        remembering.commit(choice())
        raise RuntimeError("the GPU is lost")

    with pytest.raises(RuntimeError, match="lost"), deferred.put_off():
        fails()
    assert find() == ("eng1", "store")
    remembering.commit(choice(sampling="race"))
    assert find(sampling="race") == ("eng1", "store")
    assert len(list(folder.iterdir())) == 2  # the file and its lock


@pytest.mark.usefixtures("folder")
def test_what_nobody_timed_is_not_kept() -> None:
    untimed = Selection((Measurement(SLOW, None, 0),), 0)
    remembering.commit(choice(selection=untimed))
    remembering.commit(choice(selection=Selection((Measurement(OWN_PATH, None, 0),), 0)))
    for origin in ("store", "agreed", "pinned"):
        remembering.commit(choice(origin=origin))
    assert find() is None


@pytest.mark.parametrize(
    ("mode", "reads", "writes"),
    [("off", False, False), ("read", True, False), ("read_write", True, True),
     ("retune", False, True)],
)  # fmt: skip
def test_the_modes(tmp_path: Path, mode: str, reads: bool, writes: bool) -> None:
    ca.set_store(tmp_path, mode="read_write")
    remembering.commit(choice())
    ca.set_store(tmp_path, mode=mode)
    assert (find() is not None) == reads
    remembering.commit(choice(sampling="race"))
    ca.set_store(tmp_path, mode="read")
    assert (find(sampling="race") is not None) == writes


def test_the_users_decisions_win_over_shipped_ones(tmp_path: Path) -> None:
    ca.set_store(tmp_path / "shipped", mode="read_write")
    remembering.commit(choice())
    remembering.commit(choice(sampling="race"))
    ca.set_store(tmp_path / "user", shipped=[tmp_path / "shipped"])
    assert find() == ("eng1", "store")
    remembering.commit(choice(chosen=1))
    assert find() == ("eng2", "store")
    assert find(sampling="race") == ("eng1", "store")
    ca.set_store(tmp_path / "shipped", mode="read")
    assert find() == ("eng1", "store")


def test_shipped_takes_several_paths(tmp_path: Path) -> None:
    wrong: Any
    for wrong in ("decisions.json", tmp_path):
        with pytest.raises(ValueError, match="shipped must be a list of paths, got one"):
            ca.set_store(shipped=wrong)
    for wrong in (5, [5]):
        with pytest.raises(TypeError, match="shipped must be a"):
            ca.set_store(shipped=wrong)
    wrong = 5
    with pytest.raises(TypeError, match="path must be a path, got 5"):
        ca.set_store(wrong)
    assert store_settings.get_store_settings().shipped == ()
    with pytest.warns(UserWarning, match=r"absent\.json does not exist") as said:
        ca.set_store(shipped=[tmp_path / "absent.json"])
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ca.set_store(shipped=[tmp_path / "absent.json", tmp_path / "a folder"])


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_stored_serves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """A strategy of the user's may bring evidence that makes no sense."""
    nonsense = dataclasses.replace(SELECTION, evidence=Evidence("mine", regret_bound=-0.5))
    remembering.commit(choice(selection=nonsense))
    assert find() is None
    assert "is not kept" in caplog.text
    assert "regret_bound" in caplog.text


@pytest.mark.usefixtures("folder")
def test_agreed_wins_over_the_store_and_a_pin_over_both() -> None:
    remembering.commit(choice())
    agreed = choice(chosen=1).decision
    remembering.install([agreed], 0)
    assert find() == ("eng2", "agreed")
    assert [c.origin for c in ca.choices()] == ["agreed"]
    assert ca.choices()[0].text == "eng2"
    ca.pin(PROBLEM, "aten")
    assert find() == ("aten", "pinned")
    assert ca.choices() == []
    ca.unpin(PROBLEM)
    assert find() == ("eng2", "agreed")
    ca.set_store(mode="off")
    assert find() == ("eng2", "agreed")
    assert remembering.find(PROBLEM, Policy("auto"), 1) is None  # nobody agreed for device 1
    ca.set_store(mode="read_write")
    ca.forget()
    # What ranks agreed upon was stored as well.
    assert find() == ("eng2", "store")


@pytest.mark.usefixtures("folder")
def test_winners_of_similar_problems_are_offered() -> None:
    near = ca.ConvProblem("fprop", (4, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
    far = ca.ConvProblem("fprop", (8, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
    other = ca.ConvProblem("dgrad", (4, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
    remembering.commit(choice(problem=far))
    remembering.commit(choice(problem=near, chosen=1))
    remembering.commit(choice(problem=other))
    assert [c.text for c in remembering.similar(PROBLEM, 0)] == ["eng2", "eng1"]
    ca.set_store(mode="off")
    assert remembering.similar(PROBLEM, 0) == []


def test_another_process_knows_it(folder: Path) -> None:
    remembering.commit(choice())
    code = f"""
import torch, cudnn_autotune as ca
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.tuning import remembering
ca.set_store({str(folder)!r}, mode="read")
problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)
print(remembering.find(problem, Policy("auto"), 0).text)
"""
    assert evaluate_forked(code) == "eng1"


def test_what_was_measured_earlier_keeps_its_moment(folder: Path) -> None:
    """Else old measurements would beat newer ones elsewhere, once ranks have agreed upon them."""
    earlier = Provenance("580.1", "2.11.0", "0.1.0", "2026-01-02T12:00:00Z")
    remembering.commit(choice(provenance=earlier))
    known = remembering.find(PROBLEM, Policy("auto"), 0)
    assert known.provenance == earlier
    remembering.install([known.decision], 0)
    (stored,) = ca.get_store()
    assert stored.provenance == earlier
    assert [c.provenance for c in ca.choices()] == [earlier]


def test_what_is_pinned_is_not_tuned() -> None:
    """It would be given out to other ranks as measured."""
    ca.pin(PROBLEM, "aten")
    with pytest.raises(RuntimeError, match="aten is pinned, which leaves nothing to tune"):
        tune_problem.tune(PROBLEM, 0, "race")


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_operands_have_the_problems_alignment_and_no_larger_one(op: str) -> None:
    """Views into one flat parameter, as FSDP makes them, begin anywhere."""
    shapes = ((2, 8, 9, 9), (4, 8, 3, 3))
    for dtype, memory_format, alignment in (
        (torch.float16, torch.channels_last, (2, 4, 8)),
        (torch.float32, torch.contiguous_format, (16, 4, 32)),
        (torch.float64, torch.contiguous_format, (8, 32, 16)),
    ):
        problem = ca.ConvProblem(
            op, *shapes, dtype=dtype, memory_format=memory_format, alignment=alignment
        )
        data = measuring.operands(problem, "cpu")
        assert tuple(min(t.data_ptr() & -t.data_ptr(), 32) for t in data) == alignment
        for tensor, shape in zip(data, (*shapes, problem.output_shape), strict=True):
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert tensor.is_contiguous(memory_format=memory_format)
            assert bool(tensor.isfinite().all())
            assert tensor.double().std() > 0.5


def flags() -> dict[str, Any]:
    """What the operator reads of a caller's settings, and whether errors are warnings."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "enabled": cudnn.enabled,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": cudnn.conv.fp32_precision,
        "float16": (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction_split_k,
        ),
        "bfloat16": (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        ),
    }


def set_precision(conv: str, everything: str = "none") -> None:
    torch._C._set_fp32_precision_setter("generic", "all", everything)
    torch._C._set_fp32_precision_setter("cuda", "conv", conv)


def set_reductions(allowed: bool, split_k: bool) -> None:
    torch._C._set_cublas_allow_fp16_reduced_precision_reduction(allowed, split_k)
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(allowed, split_k)


# A caller's settings, and how they are taken back. By torch._C: torch.testing forbids assignments.
CALLERS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "as they are": (lambda: None, lambda: None),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "deterministic, warning": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "deterministic cuDNN": (
        lambda: torch._C._set_cudnn_deterministic(True),
        lambda: torch._C._set_cudnn_deterministic(False),
    ),
    "no cuDNN": (
        lambda: torch._C._set_cudnn_enabled(False),
        lambda: torch._C._set_cudnn_enabled(True),
    ),
    "no TF32": (
        lambda: torch._C._set_cudnn_allow_tf32(False),
        lambda: torch._C._set_cudnn_allow_tf32(True),
    ),
    "no TF32, by its newer name": (lambda: set_precision("ieee"), lambda: set_precision("tf32")),
    "TF32 for all": (lambda: set_precision("none", "tf32"), lambda: set_precision("tf32")),
    "no reduced precision": (
        lambda: set_reductions(False, True),
        lambda: set_reductions(True, True),
    ),
    "no reduced precision, no split": (
        lambda: set_reductions(False, False),
        lambda: set_reductions(True, True),
    ),
}


@pytest.fixture(params=CALLERS)
def before(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A caller's flags."""
    as_it_was = flags()
    apply, take_back = CALLERS[request.param]
    apply()
    yield flags()
    take_back()
    assert flags() == as_it_was


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_problems_flags_are_set_for_it_and_restored(
    before: dict[str, Any], dtype: torch.dtype
) -> None:
    for strict, tf32, reduced in itertools.product((False, True), repeat=3):
        problem = ca.ConvProblem(
            *("fprop", (2, 8, 9, 9), (4, 8, 3, 3)),
            dtype=dtype,
            deterministic=strict,
            allow_tf32=tf32,
            allow_reduced_precision=reduced,
        )
        with tune_problem.flags_of(problem, "cuda"):
            now = flags()
        assert now["enabled"]
        assert now["deterministic"] == strict
        if dtype == torch.float32:
            assert (now["precision"] == "tf32") == tf32
        else:
            assert all(now[str(dtype).removeprefix("torch.")]) == reduced
        assert flags() == before


class DepthwiseSetting:
    """Stands for the two functions of a torch that has the setting."""

    def __init__(self) -> None:
        self.kernel = "native"

    def read(self) -> str:
        return self.kernel

    def write(self, kernel: str) -> None:
        self.kernel = kernel


@pytest.fixture
def depthwise_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """The caller's ``depthwise_kernel`` is "native"; the value reads it. The setting is the real
    one where torch has it (2.14 and later)."""
    if not hasattr(torch._C, "_get_cudnn_depthwise_kernel"):
        setting = DepthwiseSetting()
        monkeypatch.setattr(torch._C, "_get_cudnn_depthwise_kernel", setting.read, raising=False)
        monkeypatch.setattr(torch._C, "_set_cudnn_depthwise_kernel", setting.write, raising=False)
    before = torch._C._get_cudnn_depthwise_kernel()
    torch._C._set_cudnn_depthwise_kernel("native")
    yield torch._C._get_cudnn_depthwise_kernel
    torch._C._set_cudnn_depthwise_kernel(before)


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "native"])
def test_pytorchs_depthwise_kernel_is_the_problems_while_it_is_tuned(
    depthwise_native: Callable[[], str], kernel: Any
) -> None:
    problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 1, 3, 3), groups=8, depthwise_kernel=kernel)
    with tune_problem.flags_of(problem, "cuda"):
        assert depthwise_native() == kernel
    assert depthwise_native() == "native"


def test_autocast_does_not_turn_a_problem_into_another() -> None:
    problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (4, 8, 3, 3))
    data = measuring.operands(problem, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measuring.run_operator(problem, data, "race").dtype == torch.bfloat16
        with tune_problem.flags_of(problem, "cpu"):
            assert measuring.run_operator(problem, data, "race").dtype == torch.float32


# Stored decisions of a mode that is not registered here, as that of another program or a former
# one of the package.

MODE = "neighbour"


@pytest.fixture
def decision() -> Decision:
    assert MODE not in ca.sampling.names()
    return under(simulation("quiet", layer()), mode=MODE)


@pytest.mark.search
def test_no_other_mode_is_served_by_it(decision: Decision, tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    ca.get_store().add([decision])
    for mode in ("auto", "race"):
        assert remembering.find(decision.problem, Policy(mode), 0) is None
    larger = layer(channels=128)
    assert remembering.find(larger, Policy("auto"), 0) is None
    assert remembering.similar(larger, 0) == [decision.chosen.candidate]
    measured = under(decision, mode="auto")
    ca.get_store().add([measured])
    assert remembering.find(decision.problem, Policy("auto"), 0).decision.sampling == "auto"
