"""A convolution with a bias: engines that add it, and unfused ones, in one list and one race."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.problems import PROBLEMS, SHIPPED_GPUS, make
from support.conv.references import assert_close
from support.simulation import GPU, SimulatedEngine, Watched, candidate
from support.store.decisions import decision as decision_of
from support.tuning.made_up_plans import plan_of

import cudnn_autotune as ca
from cudnn_autotune import _C, sampling
from cudnn_autotune.engines.configs import OWN_PATH, Candidate, open_search
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling import Limits
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.timers.lacking import NOTHING
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import miss, remembering, serving
from cudnn_autotune.tuning.choice import Choice

pytestmark = pytest.mark.search

CL = torch.channels_last
PLAIN = make("resnet_fp16_nhwc")
BIASED = make("resnet_fp16_nhwc", bias=True)
POINTWISE: dict[str, Any] = {
    "input_shape": (4, 64, 14, 14),
    "weight_shape": (96, 64, 1, 1),
    "dtype": torch.float16,
    "memory_format": CL,
}


@functools.cache
def listed(problem: ca.ConvProblem, device: str = "h200") -> list[Candidate]:
    """Engine configs of cuDNN, of both kinds."""
    return [c for c in ca.expert.candidates(problem, device) if c.engine is not None]


def first(is_unfused: bool) -> Candidate:
    return next(c for c in listed(BIASED) if c.is_unfused == is_unfused)


# What cuDNN lists


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("device", SHIPPED_GPUS)
def test_what_serves_without_a_bias_serves_with_one(name: str, device: str) -> None:
    """Nothing that a layer with a bias ran before is missing now."""
    plain = listed(make(name), device)
    mixed = listed(make(name, bias=True), device)
    unfused = [c for c in mixed if c.is_unfused]
    assert [c.text for c in unfused] == [f"unfused:{c.text}" for c in plain]
    for one, other in zip(unfused, plain, strict=True):
        changed = {"text": other.text, "rank": other.rank}
        assert replace(one, **changed) == other
    assert mixed[0].is_unfused, "PyTorch runs the first"
    assert [c.rank for c in mixed] == list(range(len(mixed)))
    assert len({c.text for c in mixed}) == len(mixed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_both_kinds_alternate(dtype: torch.dtype) -> None:
    """So a limit on the number of candidates leaves some of each."""
    problem = make("resnet_fp16_nhwc", bias=True, dtype=dtype)
    kinds = [c.is_unfused for c in listed(problem) if c.heuristic_mode == "A"]
    both = 2 * min(kinds.count(True), kinds.count(False))
    # Some versions of cuDNN list no engine of float64 that adds a bias.
    assert both > 0 or dtype is torch.float64
    assert kinds[:both] == [True, False] * (both // 2)


@pytest.mark.parametrize(
    "epilogue",
    [
        {},
        {"bias": True, "activation": "relu"},
        {"residual": True},
        {"bias": True, "residual": True},
    ],
    ids=str,
)
def test_only_a_lone_bias_is_added_apart(epilogue: dict[str, Any]) -> None:
    problem = make("resnet_fp16_nhwc", **epilogue)
    assert not any(c.is_unfused for c in listed(problem))
    with pytest.raises(ca.CudnnError, match="unfused:eng0"):
        ca.expert.build_plan(problem, "unfused:eng0", "h200")


@pytest.mark.parametrize("is_unfused", [True, False])
def test_a_config_is_built_from_its_text(is_unfused: bool) -> None:
    one = first(is_unfused)
    plan = ca.expert.build_plan(BIASED, one.text, "h200")
    assert (plan.text, plan.workspace_bytes) == (one.text, one.workspace_bytes)
    assert ca.expert.parse_engine_text(one.text) == (one.engine, one.knobs)
    assert one.text.startswith(one.engine_name)
    assert one.engine_name == ("unfused:" if is_unfused else "") + f"eng{one.engine}"


# The matrix product


@pytest.mark.parametrize("channels", [(64, 96, 1), (24, 1, 1), (1, 40, 1), (32, 12, 4)])
def test_the_matrix_product_adds_the_bias(channels: tuple[int, int, int]) -> None:
    c, k, groups = channels
    of_groups = {"input_shape": (3, c, 7, 5), "weight_shape": (k, c // groups, 1, 1)}
    fields = {**POINTWISE, **of_groups, "groups": groups, "dtype": torch.bfloat16}
    problem = ca.ConvProblem("fprop", **fields, bias=True)
    x, w, y, bias = operands(problem, "cpu")
    y.fill_(float("nan"))
    _C.execute(_C.build_plan(problem.native(), "matmul", 0), x, w, y, bias)
    expected = F.conv2d(x.double(), w.double(), bias.double(), groups=groups)
    assert_close(y, expected, 1e-2)


# The race


def simulated(text: str, rank: int, time_ms: float, **fields: Any) -> SimulatedEngine:
    number = text.removeprefix("unfused:").removeprefix("eng").split(":")[0]
    one = replace(candidate(text, rank), engine=int(number) if number.isdecimal() else None)
    if one.engine is None:
        one = replace(one, heuristic_mode="")
    return SimulatedEngine(one, time_ms, 100.0, **{"first_run_ms": 0.0, **fields})


def chosen(
    mode: str, *engines: SimulatedEngine, limits: Limits | None = None
) -> tuple[Selection, set[str]]:
    timer = Watched(GPU, engines)
    found = sampling.get(mode).select(timer.candidates, timer, limits or Limits())
    assert found is not None
    return found, set(timer.ran)


@pytest.mark.parametrize("mode", ["race", "sustained", "auto"])
@pytest.mark.parametrize(("fused_ms", "wins"), [(1.0, "eng41"), (2.2, "unfused:eng63")])
def test_the_faster_kind_is_chosen(mode: str, fused_ms: float, wins: str) -> None:
    found, ran = chosen(
        mode,
        simulated("unfused:eng62", 0, 2.0),
        simulated("eng41", 1, fused_ms),
        simulated("unfused:eng63", 2, 1.9),
        simulated("aten", 9, 0.5),
    )
    assert found.winner.candidate.text == wins
    # PyTorch's own path is the first unfused plan, which stands for it.
    assert "aten" not in ran
    own = next(entry for entry in found.ranking if entry.candidate.text == "aten")
    assert own.runs == "unfused:eng62"


def test_where_no_unfused_plan_builds_pytorchs_own_path_is_timed() -> None:
    """A plan that adds the bias is none that PyTorch would run."""
    found, ran = chosen(
        "race",
        simulated("unfused:eng62", 0, 2.0, builds=False),
        simulated("eng41", 1, 1.0),
        simulated("aten", 9, 0.9),
    )
    assert ran == {"eng41", "aten"}
    assert found.winner.candidate.text == "aten"
    assert found.winner.runs == ""


def test_auto_times_as_many_of_each_kind_as_pytorch_does() -> None:
    """With fewer unfused ones it could be slower than PyTorch's benchmark mode."""
    engines = [
        simulated(f"{'' if rank % 2 else 'unfused:'}eng{rank}", rank, 1.0) for rank in range(30)
    ]
    _, ran = chosen("auto", *engines)
    assert ran == {engine.candidate.text for engine in engines[:20]}


@pytest.mark.parametrize("is_unfused", [True, False])
def test_only_what_pytorch_would_run_is_served_unchecked(is_unfused: bool) -> None:
    """The plan fails where it is run to be checked."""
    one = first(is_unfused)
    selection = Selection((Measurement(one, None, 0),), 0)
    plans = {one.text: plan_of(one.text, BIASED)}
    timer: Any = SimpleNamespace(plans=plans, lacking=lambda: NOTHING)
    with miss.searched(BIASED, selection, timer):
        plan, *_ = miss.choose(BIASED.native(), "auto", -1, 0, 0, *operands(BIASED, "cpu"))
    assert plan.text == (one.text if is_unfused else OWN_PATH.text)


# What is remembered


def remembered() -> Choice:
    ranking = tuple(
        Measurement(c, 1.0 + i, 9) for i, c in enumerate((first(True), first(False), OWN_PATH))
    )
    decision = decision_of(problem=BIASED, selection=Selection(ranking, 27))
    return Choice(decision, 0, "store")


@pytest.mark.parametrize("is_unfused", [True, False])
def test_a_remembered_choice_is_built_without_another(is_unfused: bool) -> None:
    """An unfused one needs nothing that is known of the problem without a bias."""
    known = remembered()
    ranking = (Measurement(first(is_unfused), 1.0, 9),)
    known = replace(known, decision=replace(known.decision, selection=Selection(ranking, 9)))
    search = functools.partial(open_search, BIASED, "h200")
    assert serving.built(known, search).text == first(is_unfused).text
    plain = functools.partial(open_search, PLAIN, "h200")
    if is_unfused:
        with pytest.raises(serving.UnfitError, match="no longer builds"):
            serving.built(replace(known, decision=replace(known.decision, problem=PLAIN)), plain)


def test_a_pin_is_of_the_problem_with_its_bias() -> None:
    ca.pin(BIASED, first(True).text)
    found = remembering.find(BIASED, Policy("auto"), 0)
    assert (found.text, found.origin, found.engine) == (
        first(True).text,
        "pinned",
        first(True).engine,
    )
    assert remembering.find(PLAIN, Policy("auto"), 0) is None
