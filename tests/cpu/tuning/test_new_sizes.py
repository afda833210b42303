"""New sizes of layers whose sizes keep changing: when a neighbour serves, by what, and until when.

PyTorch's own path and the matrix product run on the CPU, so that they are the engines here.
"""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.simulation import candidate
from support.tuning.made_up_plans import plan_of

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines import compiled_kernels, offers
from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.online.preparation import LazyPreparation
from cudnn_autotune.online.tuner import OnlineCommitter, Prepared
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import choice_log, miss, new_sizes, remembering, tune_problem
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.new_sizes import calls_before_trial, fast_nearby
from cudnn_autotune.tuning.serving import Served

pytestmark = [pytest.mark.search, pytest.mark.usefixtures("store")]


def sized(n: int, h: int, w: int, **changes: Any) -> ca.ConvProblem:
    values: dict[str, Any] = {
        "op": "fprop",
        "weight_shape": (8, 16, 1, 1),
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
    }
    values |= changes
    channels = values["weight_shape"][1] * values.get("groups", 1)
    return ca.ConvProblem(input_shape=(n, channels, h, w), **values)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> offers.Gpu:
    """The GPU of a property file, in place of the one that is here."""
    found = offers.gpu_of("h100")
    for module in (offers, new_sizes):
        monkeypatch.setattr(module, "gpu_of", lambda device: found)
    return found


def decision_of(
    problem: ca.ConvProblem,
    *ranking: Candidate,
    samples: int = 9,
    pytorch_ms: float = 50.0,
    rejected: tuple[tuple[str, float], ...] = (),
) -> Decision:
    """A decision as a search makes it; the first of the ranking won."""
    timed = [Measurement(c, 1.0 + i, samples) for i, c in enumerate(ranking)]
    if OWN_PATH not in ranking:
        timed.append(Measurement(OWN_PATH, pytorch_ms, samples))
    selection = Selection(tuple(timed), samples * len(timed))
    return Decision(problem, Policy("auto"), selection, 1e-4, rejected)


def record(problem: ca.ConvProblem, *entries: Measurement, device: int = 0) -> None:
    """Records a choice as a search makes it."""
    selection = Selection(entries, sum(entry.samples for entry in entries))
    choice_log.record(Choice(Decision(problem, Policy("auto"), selection, 1e-4), device, "tuned"))


def measure(problem: ca.ConvProblem, *ranking: Candidate, device: int = 0, **others: Any) -> None:
    """Records a choice with these times of 1 ms, 2 ms, and so on."""
    choice_log.record(Choice(decision_of(problem, *ranking, **others), device, "tuned"))


def texts(problem: ca.ConvProblem, device: int = 0) -> list[str] | None:
    """Of what serves a new size before PyTorch's own path; None where it is to be searched for."""
    nearby = fast_nearby(problem, device)
    return nearby and [c.text for c in nearby.serving]


def measure_four(*winners: Candidate, **changes: Any) -> None:
    """A layer at batch size 2, in 8 by 8, 10, 12 and 14."""
    given = winners or [candidate(f"of{width}") for width in (8, 10, 12, 14)]
    for width, winner in zip((8, 10, 12, 14), given, strict=True):
        measure(sized(2, 8, width, **changes), winner)


# Which candidates


def test_a_layer_that_changes_takes_the_nearest_winners() -> None:
    measure_four()
    assert texts(sized(2, 8, 13)) == ["of14", "of12", "of10", "of8"]
    assert texts(sized(2, 8, 7)) == ["of8", "of10", "of12"]
    assert texts(sized(3, 8, 8))[0] == "of8"


def test_one_measured_size_serves_those_near_it() -> None:
    measure(sized(2, 8, 16), candidate("one"), samples=0)  # nothing was measured
    assert texts(sized(2, 8, 11)) is None
    measure(sized(2, 8, 14), candidate("one"))
    assert texts(sized(2, 8, 11)) == ["one"]


def test_a_far_size_is_served_by_pytorchs_own_path_once_a_layer_has_met_a_few() -> None:
    measure(sized(2, 8, 8), candidate("one"))
    for width in range(9, 15):
        assert texts(sized(2, 8, width)) == ["one"]
    assert texts(sized(2, 64, 64)) is None
    assert texts(sized(2, 64, 60)) == []
    assert texts(sized(2, 8, 15)) == ["one"]
    assert texts(sized(2, 64, 64, stride=2)) is None  # another layer


CASE = [(1, 8, 8), (1, 17, 900), (64, 14, 14), (2, 512, 512), (1, 1, 2000), (128, 7, 9)]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "edge", "groups"),
    [(64, 64, 3, 1), (3, 64, 7, 1), (128, 128, 3, 32), (96, 96, 7, 96), (256, 64, 1, 1)],
)
def test_sizes_unlike_the_measured_ones_are_pytorchs(
    layout: torch.memory_format, channels: int, filters: int, edge: int, groups: int
) -> None:
    """However large the gain was there."""
    layer: dict[str, Any] = {
        "weight_shape": (filters, channels // groups, edge, edge),
        "padding": edge // 2,
        "groups": groups,
        "memory_format": layout,
    }
    for height in range(64, 137, 8):
        if texts(sized(8, height, height + 8, **layer)) is None:
            measure(sized(8, height, height + 8, **layer), candidate("fast"))
    assert texts(sized(8, 64, 80, **layer)) == ["fast"]
    for size in CASE:
        assert texts(sized(*size, **layer)) == []


def test_a_small_gain_serves_sizes_that_are_very_near_only() -> None:
    measure(sized(8, 300, 300), candidate("fast"), pytorch_ms=1.05)
    assert texts(sized(8, 300, 304)) == ["fast"]
    assert texts(sized(8, 300, 400)) == []


def test_a_candidate_that_lost_at_another_alike_size_does_not_serve() -> None:
    timed(sized(8, 300, 300), fast=1.0, aten=1.2)
    assert texts(sized(8, 300, 310)) == ["fast"]
    timed(sized(8, 300, 320), aten=1.0, fast=1.3)
    assert texts(sized(8, 300, 311)) == []


def test_a_single_launch_of_pytorchs_own_path_may_have_been_disturbed() -> None:
    measure(sized(8, 300, 300), candidate("fast"), samples=1, pytorch_ms=1.4)
    assert texts(sized(8, 300, 310)) == []


def test_where_pytorchs_own_path_was_not_timed_nothing_beats_it() -> None:
    record(sized(2, 8, 8), Measurement(candidate("first"), 1.0, 9))
    assert texts(sized(2, 8, 9)) == []


def test_a_fused_problem_takes_longer_by_pytorch_than_its_convolution() -> None:
    """PyTorch's own path is left out of the search then."""
    fused = {"activation": "relu", "bias": True}
    measure(sized(8, 300, 300), candidate("alone"), pytorch_ms=2.0)
    record(sized(8, 300, 300, **fused), Measurement(candidate("fused"), 1.0, 9))
    assert texts(sized(8, 300, 310, **fused)) == ["fused"]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "dgrad"},
        {"weight_shape": (16, 16, 1, 1)},
        {"weight_shape": (8, 24, 1, 1)},
        {"groups": 2},
        {"stride": 2},
        {"padding": 1},
        {"dtype": torch.bfloat16},
        {"memory_format": torch.contiguous_format},
        {"deterministic": True},
        {"allow_reduced_precision": False},
        {"alignment": (16, 32, 32)},
        {"bias": True},
        {"activation": "relu"},
    ],
    ids=str,
)
def test_another_layer_is_no_neighbour(changes: dict[str, Any]) -> None:
    measure_four()
    assert texts(sized(2, 8, 9, **changes)) is None


def test_another_device_is_no_neighbour_and_a_size_that_was_measured_is_not_new() -> None:
    """Under another policy it is tuned, as documented."""
    measure_four()
    assert texts(sized(2, 8, 9), device=1) is None
    assert texts(sized(2, 8, 10)) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_tunings_is_bounded(seed: int) -> None:
    """Whatever the sizes; and there are few where they differ as pictures do."""
    rng = random.Random(seed)

    def tunings(sizes: list[tuple[int, int, int]]) -> int:
        ca.forget()
        tuned = 0
        for size in sizes:
            if texts(sized(*size)) is None:
                tuned += 1
                measure(sized(*size), candidate("one"))
        return tuned

    pictures = [(2, rng.randint(480, 1333), rng.randint(480, 1333)) for _ in range(200)]
    wild = [tuple(int(2 ** rng.uniform(0, 9)) for _ in range(3)) for _ in range(400)]
    assert tunings(pictures) <= 4
    assert 2 <= tunings(list(dict.fromkeys(wild))) <= 8  # type: ignore[arg-type]


def test_what_is_compiled_at_run_time_does_not_stall_a_new_size(searches: list[str]) -> None:
    compiled = replace(candidate("slow to build"), behavior_notes=("RUNTIME_COMPILATION",))
    for width in (8, 10, 12):
        measure(sized(2, 8, width), compiled)
    measure(sized(2, 8, 14), compiled, candidate("second"), candidate("third"))
    nearby = fast_nearby(sized(2, 8, 9), 0)
    assert [c.text for c in nearby.contenders] == ["slow to build", "second"]
    assert texts(sized(2, 8, 13)) == ["slow to build", "second", "third"]
    assert [c.text for c in new_sizes.ready(nearby, sized(2, 8, 9), 0)] == ["second", "third"]
    # Nor is it tuned at every size where there is nothing else.
    ca.forget()
    measure(sized(2, 8, 14), compiled)
    assert texts(sized(2, 8, 13)) == ["slow to build"]
    made, is_tried = ask(sized(2, 8, 9))
    assert (made.text, made.origin, is_tried, searches) == ("aten", "neighbour", True, [])


def timed(problem: ca.ConvProblem, **times_ms: float) -> None:
    """Records a choice of which candidates took so long, the first of which was chosen."""
    record(problem, *(Measurement(candidate(name), ms, 9) for name, ms in times_ms.items()))


def compared(problem: ca.ConvProblem) -> list[str]:
    """Of what takes turns at a new size."""
    nearby = fast_nearby(problem, 0)
    assert nearby is not None
    return [c.text for c in nearby.contenders]


def test_what_is_good_on_all_measured_sizes_goes_before_what_won_on_one() -> None:
    timed(sized(2, 8, 8), narrow=1.0, steady=1.02, wide=1.25, aten=9.0)
    timed(sized(2, 8, 16), wide=2.0, steady=2.04, narrow=2.5, aten=18.0)
    assert compared(sized(2, 8, 11)) == ["steady", "narrow", "wide"]
    # The nearest one decides where it is much nearer.
    for height, width, first in ((9, 8, "narrow"), (9, 16, "wide")):
        assert compared(sized(2, height, width))[0] == first


@pytest.mark.parametrize(
    ("times_ms", "serving", "contenders", "is_known"),
    [
        # Far from the best.
        (
            {"best": 1.0, "near": 1.2, "far": 1.4, "aten": 2.0},
            ["best", "near", "far"],
            ["best", "near"],
            False,
        ),
        # By less than matters; the first was chosen for its workspace or the like.
        (
            {"chosen": 1.002, "faster": 1.0, "aten": 9.0},
            ["faster", "chosen"],
            ["chosen", "faster"],
            False,
        ),
        ({"best": 1.0, "aten": 1.01}, [], ["best", "aten"], False),
        ({"aten": 1.0, "near": 1.01}, [], ["aten", "near"], True),
        # Times that nobody measured, as of a store's file that was edited.
        (
            {"zero": 0.0, "good": 1.0, "endless": math.inf, "aten": 9.0},
            ["good"],
            ["good"],
            False,
        ),
    ],
    ids=str,
)
def test_what_serves_and_what_competes_at_a_new_size(
    times_ms: dict[str, float], serving: list[str], contenders: list[str], is_known: bool
) -> None:
    timed(sized(2, 8, 8), **times_ms)
    assert texts(sized(2, 8, 9)) == serving
    assert compared(sized(2, 8, 9)) == contenders
    assert fast_nearby(sized(2, 8, 9), 0).is_known is is_known


def test_a_size_without_times_is_no_neighbour() -> None:
    timed(sized(2, 8, 8), zero=0.0)
    assert texts(sized(2, 8, 9)) is None


def test_an_implementation_is_judged_by_its_best_setting_of_each_size() -> None:
    for width, times in ((8, (1.0, 1.4)), (16, (1.4, 1.0))):
        ranking = [
            *(Measurement(named(f"fixed@1:ROWS={i}"), ms, 9) for i, ms in enumerate(times)),
            Measurement(candidate("engine"), 1.1, 9),
            Measurement(OWN_PATH, 9.0, 9),
        ]
        record(sized(2, 8, width), *sorted(ranking, key=lambda e: e.time_ms or 0))
    assert compared(sized(2, 8, 9)) == ["fixed@1:ROWS=0", "engine"]
    assert compared(sized(2, 8, 15)) == ["fixed@1:ROWS=1", "engine"]


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [((1.0, 1.4), True), ((1.0, 8.9), False), ((1.0,), False)],
    ids=str,
)
def test_other_settings_serve_where_the_slowest_one_would(
    times_ms: tuple[float, ...], expected: bool
) -> None:
    timed_settings = [
        Measurement(named(f"fixed@1:ROWS={i}"), ms, 9) for i, ms in enumerate(times_ms)
    ]
    record(sized(2, 8, 8), *timed_settings, Measurement(OWN_PATH, 9.0, 9))
    nearby = fast_nearby(sized(2, 8, 9), 0)
    assert "fixed@1:ROWS=0" in [c.text for c in nearby.serving]
    assert nearby.any_setting == ({"fixed@1"} if expected else set())


def test_what_was_wrong_nearby_does_not_serve() -> None:
    measure_four()
    measure(sized(2, 8, 16), candidate("wrong"), candidate("right"), rejected=(("wrong", 0.5),))
    assert texts(sized(2, 8, 17))[0] == "right"


def test_sizes_without_a_right_engine_are_no_neighbours() -> None:
    for width in (8, 10, 12):
        rejected = (("wrong", 0.5),)
        measure(sized(2, 8, width), candidate("wrong"), pytorch_ms=0.0, rejected=rejected)
    measure(sized(2, 8, 14), candidate("right"))
    assert texts(sized(2, 8, 13)) == ["right"]


# How a call is served


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that searched. A search needs a GPU; here it ends as where nothing runs, with
    PyTorch's own path."""
    made: list[str] = []

    def search(call: miss.Miss, mode: str) -> Served:
        made.append(mode)
        return miss._by_own_path(call)

    monkeypatch.setattr(miss, "_search", search)
    return made


def ask(
    problem: ca.ConvProblem, mode: str = "auto", tensors: Sequence[torch.Tensor] = ()
) -> tuple[Choice, bool]:
    """As C++ asks for the choice of a problem that misses; with it, whether there is a trial."""
    given = tensors or operands(problem, "cpu")
    plan, trial, _, afterwards = miss.choose(problem.native(), mode, -1, 0, 0, *given)
    if afterwards is not None:
        afterwards()
    (made,) = [c for c in ca.choices() if (c.problem, c.sampling) == (problem, mode)]
    assert made.text == plan.text
    return made, trial is not None


NEW = sized(2, 8, 9)


@pytest.mark.parametrize("mode", ["auto", "race", "sustained", "online", "sample_once"])
@pytest.mark.parametrize("policy", ["online", "neighbour"])
def test_a_neighbours_engine_is_served_unmeasured(
    policy: str, mode: str, store: ca.Store, searches: list[str]
) -> None:
    measure_four(*[MATMUL] * 4)
    ca.set_new_shapes(policy)
    made, is_tried = ask(NEW, mode)
    assert (made.text, made.origin, made.total_samples) == ("matmul", "neighbour", 0)
    assert made.selection.evidence.rule == "chosen for a similar problem"
    assert made.relative_error < 2e-2
    assert is_tried is (policy == "online")
    assert len(store) == 0, "only what was measured is stored"
    assert searches == []


def test_a_kernel_that_is_compiled_serves_with_its_settings_here(
    monkeypatch: pytest.MonkeyPatch, searches: list[str]
) -> None:
    """The engines of this GPU are not there, so that its plan computes by PyTorch."""
    gpu = offers.gpu_of("h100")
    for module in (offers, new_sizes):
        monkeypatch.setattr(module, "gpu_of", lambda device: gpu)

    def build(native: _C.ConvProblem, text: str, device: int) -> _C.Plan:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: torch.Tensor) -> None:
            y.copy_(torch.nn.functional.conv2d(x.float(), w.float(), stride=2, padding=3))

        return plan_of(text, ca.ConvProblem.from_native(native), run)

    monkeypatch.setattr(_C, "build_plan", build)
    layer: dict[str, Any] = {"weight_shape": (64, 3, 7, 7), "stride": 2, "padding": 3}
    there, here = sized(2, 64, 64, **layer), sized(2, 64, 72, **layer)
    best, *others = [c for c in offers.offers_of(there, gpu) if c.text.startswith("few_channels@")]
    assert best.text not in [c.text for c in offers.offers_of(here, gpu)]
    measure(there, best, *others, OWN_PATH)
    compiled_kernels.clear()
    assert ask(here)[0].text == "aten", "nothing was compiled yet"
    while new_sizes._waiting:
        new_sizes._waiting.popleft().result()
    choice_log.forget_problem(here)
    made, is_tried = ask(here)
    assert made.text in [c.text for c in offers.offers_of(here, gpu)]
    assert made.text.startswith("few_channels@")
    assert (made.origin, made.total_samples, is_tried) == ("neighbour", 0, True)
    assert made.relative_error < 2e-2
    assert searches == []


@pytest.mark.parametrize(
    ("demand", "mode"),
    [
        (lambda: ca.set_new_shapes("tune"), "auto"),
        (lambda: ca.set_store(mode="retune"), "auto"),
        (lambda: None, "heuristic"),  # times nothing, and stays as it is
    ],
)
def test_a_search_where_one_is_asked_for(
    demand: Callable[[], None], mode: str, searches: list[str]
) -> None:
    measure_four(*[MATMUL] * 4)
    demand()
    made, is_tried = ask(NEW, mode)
    assert (made.origin, is_tried, searches) == ("tuned", False, [mode])


def test_what_is_known_comes_first(store: ca.Store) -> None:
    measure_four(*[MATMUL] * 4)
    selection = Selection((Measurement(OWN_PATH, 1.0, 9),), 9)
    store.add([Decision(NEW, Policy("auto"), selection, 1e-4)])
    assert ask(NEW)[0].origin == "store"
    other = sized(2, 8, 11)
    ca.pin(other, "matmul")
    assert ask(other)[0].origin == "pinned"


def test_a_wrong_engine_gives_way_to_the_next_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    measure(sized(2, 8, 8), MATMUL, OWN_PATH)
    assert ask(sized(2, 8, 7))[0].text == "matmul"
    another = sized(2, 7, 8)
    x, w, y = operands(another, "cpu")
    # In another layout than the problem says, the product's rows lie elsewhere: a wrong output.
    made, _ = ask(another, tensors=(x, w, torch.empty(y.shape, dtype=y.dtype)))
    assert (made.text, made.origin) == ("aten", "neighbour")
    assert "matmul is wrong" in caplog.text
    assert ca.fallbacks() == {}


def test_without_an_engine_that_serves_pytorchs_own_path_does(searches: list[str]) -> None:
    """Nothing is timed or compared then either, and calls decide later."""
    padded: dict[str, Any] = {"weight_shape": (8, 16, 3, 3), "padding": 1}
    measure_four(*[MATMUL] * 4, **padded)  # no matrix product
    made, is_tried = ask(sized(2, 8, 9, **padded))
    assert (made.text, made.origin, is_tried) == ("aten", "neighbour", True)
    assert made.relative_error is None
    assert searches == []


@pytest.mark.parametrize("policy", ["online", "neighbour"])
def test_a_size_unlike_the_measured_ones_is_served_by_pytorchs_own_path(
    policy: str, searches: list[str], store: ca.Store
) -> None:
    measure_four(*[MATMUL] * 4)
    for width in range(15, 22):
        assert texts(sized(2, 8, width)) is not None
    ca.set_new_shapes(policy)
    made, is_tried = ask(sized(2, 64, 64))
    assert (made.text, made.origin, made.total_samples) == ("aten", "neighbour", 0)
    assert is_tried is (policy == "online")
    assert (len(store), searches) == (0, [])
    assert ask(sized(2, 8, 11))[0].text == "matmul"


def test_what_the_store_has_of_a_layer_are_neighbours(store: ca.Store, searches: list[str]) -> None:
    """In a new process, once the layer keeps changing."""
    store.add([decision_of(sized(2, 8, width), MATMUL) for width in (8, 32)])
    assert ask(sized(2, 8, 33))[0].origin == "tuned"
    assert searches == ["auto"]
    assert ask(sized(2, 8, 32))[0].origin == "store"
    made, _ = ask(sized(2, 8, 9))
    assert (made.text, made.origin) == ("matmul", "neighbour")
    assert searches == ["auto"]


def test_of_the_store_only_what_was_measured_and_is_alike_serves(store: ca.Store) -> None:
    unmeasured = replace(
        decision_of(sized(2, 8, 12), MATMUL),
        selection=Selection((Measurement(MATMUL, None, 0),), 0),
    )
    other = decision_of(sized(2, 8, 12, weight_shape=(16, 16, 1, 1)), MATMUL)
    store.add([unmeasured, other, decision_of(sized(2, 8, 64), MATMUL)])
    measure(sized(2, 64, 64), MATMUL)
    nearest = partial(remembering.nearest, sized(2, 8, 12), 0, 8)
    assert fast_nearby(sized(2, 8, 13), 0, nearest) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_call_is_not_tried(deterministic: bool) -> None:
    measure_four(*[MATMUL] * 4, deterministic=deterministic)
    made, is_tried = ask(replace(NEW, deterministic=deterministic))
    assert (made.origin, is_tried) == ("neighbour", not deterministic)


def test_where_pytorchs_own_path_is_the_best_nothing_is_tried() -> None:
    measure_four(*[OWN_PATH] * 4)
    made, is_tried = ask(NEW)
    assert (made.text, made.origin, is_tried) == (OWN_PATH.text, "neighbour", False)


def test_tune_decides_anew_what_was_not_measured(searches: list[str]) -> None:
    measure_four(*[MATMUL] * 4)
    ask(NEW)
    before = choice_log.generation(NEW)
    ca.set_new_shapes("neighbour")
    assert choice_log.generation(NEW) == before
    with ca.flags(new_shapes="tune"):
        assert ca.get_new_shapes() == "tune"
        assert choice_log.generation(NEW) > before
        assert [c.origin for c in ca.choices()] == ["tuned"] * 4
        assert ask(NEW)[0].origin == "tuned"
        assert searches == ["auto"]
    assert ca.get_new_shapes() == "neighbour"


def test_an_order_to_tune_is_one(monkeypatch: pytest.MonkeyPatch, searches: list[str]) -> None:
    """``cudnn-autotune tune`` and ranks that tune together take no neighbour's engine."""
    measure_four(*[MATMUL] * 4)
    assert ask(NEW)[0].origin == "neighbour"
    data = operands(NEW, "cpu")
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(tune_problem, "operands", lambda problem, device: data)
    monkeypatch.setattr(tune_problem, "run_operator", lambda problem, *_: ask(problem))
    tune_problem.tune(NEW, 0, "auto")
    (made,) = [c for c in ca.choices() if c.problem == NEW]
    assert made.origin == "tuned"
    assert searches == ["auto"]
    assert ask(sized(2, 8, 11))[0].origin == "neighbour", "the order was of one problem"
    assert texts(NEW), "and is over"


# What later calls decide


def test_a_trial_begins_once_it_can_pay() -> None:
    """The winner of each measured size takes 1 ms in these tests."""
    new = sized(2, 8, 13)
    assert calls_before_trial(new, 0) == 16, "nothing is timed"
    measure(sized(2, 8, 26), candidate("far"))
    assert calls_before_trial(new, 0) == 1000
    measure(sized(4, 8, 13), candidate("as far"))
    measure(sized(2, 8, 14), candidate("near"))
    measure(sized(2, 8, 12), candidate("near on another device"), device=1)
    measure(sized(2, 8, 13, padding=1), candidate("another layer"))
    assert calls_before_trial(new, 0) == 539, "500 ms by calls of 13/14 ms"
    assert calls_before_trial(sized(2, 8, 14 * 500), 0) == 16


def test_a_trial_that_waits_does_not_hold_the_tensors_of_its_call() -> None:
    measure_four(*[MATMUL] * 4)
    tensors = operands(NEW, "cpu")
    held = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    _, trial, *_ = miss.choose(NEW.native(), "auto", -1, 0, 0, *tensors)
    assert trial is not None
    del tensors
    gc.collect()
    assert all(storage() is None for storage in held)


def test_without_a_thread_no_trial_begins_and_the_call_is_served() -> None:
    waiting = LazyPreparation()

    def begin() -> Any:
        raise RuntimeError("can't start new thread")

    waiting.begin = begin
    assert waiting(torch.zeros(1)) == (None, 0)


def committed(*entries: Measurement, samples: int) -> Choice:
    measure_four(*[MATMUL] * 4)
    first, _ = ask(NEW)
    committer = OnlineCommitter(first, Prepared(), choice_log.generation(NEW))
    committer.commit(Selection(entries, samples))
    (made,) = [c for c in ca.choices() if c.problem == NEW]
    return made


def test_what_was_measured_in_turns_is_stored(store: ca.Store) -> None:
    made = committed(Measurement(OWN_PATH, 1.0, 9), Measurement(MATMUL, 2.0, 9), samples=18)
    assert (made.text, made.origin) == ("aten", "tuned")
    assert any("a new size of its layer" in r for r in made.selection.evidence.remarks)
    assert store.find(NEW).selection.evidence.remarks == made.selection.evidence.remarks
    ca.set_new_shapes("tune")
    assert made in ca.choices(), "it is measured"
    assert texts(sized(2, 9, 9)) == [], "and a neighbour from now on"


def test_what_was_not_measured_stays_a_neighbours(store: ca.Store) -> None:
    made = committed(Measurement(OWN_PATH, None, 0), samples=0)
    assert (made.text, made.origin) == ("aten", "neighbour")
    assert len(store) == 0
    ca.set_new_shapes("tune")
    assert made not in ca.choices()
