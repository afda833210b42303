"""What computes a batch norm of eager training: PyTorch's functions or the operators, by
measurement.

On a CPU the operators are PyTorch's functions too, and norms are measured only where a test asks
for it.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from norm_models import conv, data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.engines.norms.plan import FORMS
from cudnn_autotune.engines.norms.reference import NORM_ACTIVATIONS
from cudnn_autotune.nn import batch_norms, norm_choices
from cudnn_autotune.nn.norm_choices import NormChoice

OURS = {"pytorch": 3.0, "kept": 2.0, "half kept": 1.0, "two passes": 4.0}
PYTORCHS = {"pytorch": 1.0, "kept": 2.0, "half kept": 3.0, "two passes": 4.0}

pytestmark = pytest.mark.usefixtures("like_a_gpu")


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Norms on a CPU take the way of those on a GPU, where all forms have kernels of their own."""
    monkeypatch.setattr(batch_norms, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(norm_choices, "_forms", lambda given: list(FORMS))
    norm_choices.forget()
    yield
    norm_choices.forget()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], list[set[str]]]:
    """Returns a function that sets the times which programs seem to take. That returns a list to
    which the names of the programs are added that are timed."""

    def seems(times: Mapping[str, float]) -> list[set[str]]:
        seen: list[set[str]] = []

        def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
            for program in programs.values():
                program()
            seen.append(set(programs))
            return {name: times[name] for name in programs}

        monkeypatch.setattr(norm_choices, "time_in_turns", in_turns)
        return seen

    return seems


def is_ours(output: Tensor) -> bool:
    """Whether this package's operators have computed a tensor."""
    assert output.grad_fn is not None
    return "NormNode" in output.grad_fn.name()


def of(module: nn.Module) -> NormChoice:
    (choice,) = norm_choices.choices_of(module)
    return choice


def test_the_fastest_computes_it(timed: Any) -> None:
    x = torch.randn(4, 8, 6, 5)
    for times, chosen in ((OURS, "half kept"), (PYTORCHS, "pytorch")):
        ca.forget()
        seen = timed(times)
        model = ca.convert(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))
        for _ in range(3):
            assert is_ours(model(x)) == (chosen != "pytorch")
        assert seen == [set(times)]
        (choice,) = ca.conversion(model).norms["1"]
        assert choice.chosen == chosen
        assert choice.is_served == (chosen != "pytorch")
        assert choice.times_ms == times
        assert choice.tuning_ms > 0
        assert not choice.rejected
        assert not choice.note
        text = (
            "float32 4x8x6x5 contiguous float32, identity, gradients of input, weight, bias: "
            f"{chosen} (pytorch {times['pytorch']:.4f} ms, kept 2.0000 ms, half kept "
            f"{times['half kept']:.4f} ms, two passes 4.0000 ms)"
        )
        assert str(choice) == text
        assert f"1: {text}" in str(ca.conversion(model)).splitlines()
        assert text in ca.conversion(model)._repr_html_()


def test_times_that_are_measured() -> None:
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    model(torch.randn(4, 8, 6, 5))
    choice = of(model[0])
    assert list(choice.times_ms) == ["pytorch", *FORMS]
    assert all(0 < ms < 1e3 for ms in choice.times_ms.values())
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__)


@pytest.mark.parametrize("times", [OURS, PYTORCHS], ids=["ours", "pytorch"])
def test_a_step_that_measures_is_any_other(times: Mapping[str, float], timed: Any) -> None:
    """Outputs, gradients, statistics and random numbers are those of a step that does not."""
    timed(times)
    torch.manual_seed(0)
    plain = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
    model = ca.convert(copy.deepcopy(plain))
    found = []
    for one in (model, plain):
        x = data(4, 8, 6, 5, count=1)[0].requires_grad_()
        torch.manual_seed(1)
        output = one(x)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in one.parameters()]
        found.append([output, x.grad, *gradients, *one.buffers(), torch.rand(3)])
    assert len(norm_choices.choices_of(model[1])) == (1 if times is OURS else 2)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert model[1].num_batches_tracked == 1


def test_a_signature_is_measured_once(timed: Any) -> None:
    seen = timed(OURS)
    norms = [nn.BatchNorm2d(8) for _ in range(3)]
    model = ca.convert(nn.Sequential(*norms))
    x = torch.randn(4, 8, 6, 5)
    for _ in range(2):
        model(x)
    # The first norm's input needs no gradient.
    assert len(seen) == 2
    assert of(norms[1]) is of(norms[2])
    assert of(norms[0]) is not of(norms[1])
    before = len(seen)
    others = (
        torch.randn(5, 8, 6, 5),
        x.to(memory_format=torch.channels_last),
        x.bfloat16(),
        x.clone().requires_grad_(),
    )
    for index, other in enumerate(others[:3], 1):
        norms[0](other)
        assert len(seen) == before + index
    norms[0](others[3])  # the second norm's input
    with torch.no_grad():
        norms[0](x)
    assert len(seen) == before + 4
    assert norm_choices.choices_of(norms[0])[-1].signature.endswith("no gradients")
    norms[0].weight.requires_grad_(False)
    norms[0](x)
    assert norm_choices.choices_of(norms[0])[-1].signature.endswith("gradients of bias")
    norms[0].eval()(x)
    assert len(seen) == before + 5


def test_a_copy_begins_without_choices(timed: Any) -> None:
    seen = timed(OURS)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    model(torch.randn(4, 8, 6, 5))
    other = copy.deepcopy(model)
    assert ca.conversion(other).norms == {"0": ()}
    assert is_ours(other(torch.randn(4, 8, 6, 5)))
    assert len(seen) == 1
    assert of(other[0]) is of(model[0])


def test_what_is_forgotten_is_measured_again(timed: Any) -> None:
    seen = timed(OURS)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    x = torch.randn(4, 8, 6, 5)
    model(x)
    ca.forget()
    assert ca.conversion(model).norms == {"0": ()}
    model(x)
    assert len(seen) == 2


def test_modes_that_time_nothing(timed: Any) -> None:
    seen = timed(PYTORCHS)
    x = torch.randn(4, 8, 6, 5)
    by_mode = ca.convert(nn.Sequential(nn.BatchNorm2d(8)), sampling="heuristic")
    assert is_ours(by_mode(x))
    choice = of(by_mode[0])
    assert (choice.chosen, choice.times_ms) == ("kept", {})
    assert choice.note == "the sampling mode times nothing"
    with ca.flags(sampling="heuristic"):
        assert is_ours(ca.convert(nn.Sequential(nn.BatchNorm2d(8)))(x))
    assert seen == []
    assert not is_ours(ca.convert(nn.Sequential(nn.BatchNorm2d(8)))(x))
    assert len(seen) == 1
    assert "sampling" not in vars(ca.revert(by_mode)[0])


def test_a_norm_alone_where_pytorch_is_faster_with_the_activation(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(PYTORCHS)
    in_turns: Any = norm_choices.time_in_turns

    def by_activation(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        times: dict[str, float] = in_turns(programs, *args, **kwargs)
        is_alone = programs["pytorch"].args[0].activation == "identity"
        return {name: OURS[name] for name in times} if is_alone else times

    monkeypatch.setattr(norm_choices, "time_in_turns", by_activation)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    output = model(torch.randn(4, 8, 6, 5))
    assert output.grad_fn.name() == "ReluBackward0"
    assert "NormNode" in output.grad_fn.next_functions[0][0].name()
    assert [one.chosen for one in norm_choices.choices_of(model[0])] == ["pytorch", "half kept"]


@pytest.mark.parametrize("activation", NORM_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_results_are_not_rejected(dtype: torch.dtype, activation: str, timed: Any) -> None:
    timed(OURS)
    shapes = [(7, 24), (3, 1, 40), (4, 24, 6, 5), (2, 16, 3, 4, 5)]
    flags = itertools.product((True, False), repeat=3)
    for shape, (affine, tracks, needs) in itertools.product(shapes, flags):
        dims = max(1, len(shape) - 2)
        norm = getattr(nn, f"BatchNorm{dims}d")(shape[1], affine=affine, track_running_stats=tracks)
        x = (torch.randn(shape) * 3 + 5).to(dtype).requires_grad_(needs)
        of_call = (x, norm.weight, norm.bias, activation, tracks)
        choice = norm_choices.first_choice(norm, x, norm_choices.signature_of(*of_call))
        assert choice is not None
        assert choice.chosen == "half kept", choice
        assert not choice.rejected


@pytest.mark.parametrize(
    "input",
    [
        torch.full((4, 8, 6, 5), math.nan),
        torch.full((4, 8, 6, 5), math.inf),
        torch.zeros(4, 8, 6, 5),
        torch.ones(4, 8, 6, 5),
    ],
    ids=["NaN", "infinity", "zeros", "ones"],
)
def test_inputs_that_tell_nothing(input: Tensor, timed: Any) -> None:
    """The choice is that of other inputs; the results are PyTorch's, and NaN where those are."""
    timed(OURS)
    plain = nn.BatchNorm2d(8)
    model = ca.convert(nn.Sequential(copy.deepcopy(plain)))
    found, expected = model(input), plain(input)
    assert is_ours(found)
    assert not of(model[0]).rejected
    torch.testing.assert_close(found, expected, equal_nan=True)
    buffers = zip(model.buffers(), plain.buffers(), strict=True)
    for one, other in buffers:
        assert torch.equal(one.isfinite(), other.isfinite())


def test_one_value_that_is_not_finite(timed: Any) -> None:
    timed(OURS)
    x = torch.randn(4, 8, 6, 5)
    x[1, 3, 2, 1] = math.nan
    plain = nn.BatchNorm2d(8)
    model = ca.convert(nn.Sequential(copy.deepcopy(plain)))
    found, expected = model(x), plain(x)
    assert is_ours(found)
    assert found.isnan().sum() == 4 * 6 * 5
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_parameters_that_tell_nothing(timed: Any) -> None:
    """The last norm of a residual block often begins with weights of zero."""
    timed(OURS)
    norm = nn.BatchNorm2d(8)
    nn.init.zeros_(norm.weight)
    model = ca.convert(nn.Sequential(norm))
    assert is_ours(model(torch.randn(4, 8, 6, 5)))
    assert not of(norm).rejected
    assert torch.equal(norm.weight, torch.zeros(8))


class _Wrong:
    """The operators with an error in one of their results."""

    def __init__(self, place: int, backward: bool, factor: float) -> None:
        self.place, self.backward, self.factor = place, backward, factor

    def _changed(self, results: Any) -> Any:
        results = list(results)
        results[self.place] = results[self.place] * self.factor
        return results

    def batch_norm_act(self, *args: Any) -> Any:
        found = torch.ops.cudnn_autotune.batch_norm_act(*args)
        return found if self.backward else self._changed(found)

    def batch_norm_act_backward(self, *args: Any) -> Any:
        found = torch.ops.cudnn_autotune.batch_norm_act_backward(*args)
        return self._changed(found) if self.backward else found


@pytest.mark.parametrize("factor", [1.001, math.nan])
@pytest.mark.parametrize(
    ("place", "backward", "name"),
    [
        (0, False, "output"),
        (1, False, "running statistics"),
        (3, False, "running statistics"),
        (0, True, "gradient of the input"),
        (1, True, "gradient of the weight"),
        (2, True, "gradient of the bias"),
    ],
)
def test_wrong_results_are_rejected(
    place: int,
    backward: bool,
    name: str,
    factor: float,
    timed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = timed(OURS)
    monkeypatch.setattr(norm_choices, "_operators", _Wrong(place, backward, factor))
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    (x,) = data(4, 8, 6, 5, count=1)
    output = model(x.requires_grad_())
    assert not is_ours(output)
    choice = of(model[0])
    assert choice.chosen == "pytorch"
    assert choice.note == "no form of this package's kernels computes it"
    assert set(choice.rejected) == set(FORMS)
    assert all(why.startswith(f"is wrong: {name} has a") for why in choice.rejected.values())
    assert seen == []


def test_a_form_that_fails_is_left_out(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(OURS)
    by_operators = norm_choices._by_operators

    def fails(given: Any, form: Any, adopts: bool = False) -> Any:
        if form == "half kept":
            raise RuntimeError("a kernel was not loaded\nat some place")
        return by_operators(given, form, adopts)

    monkeypatch.setattr(norm_choices, "_by_operators", fails)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    assert is_ours(model(torch.randn(4, 8, 6, 5)))
    choice = of(model[0])
    assert choice.chosen == "kept"
    assert choice.rejected == {"half kept": "fails: RuntimeError: a kernel was not loaded"}
    assert seen == [{"pytorch", "kept", "two passes"}]


def test_without_memory_it_is_pytorchs(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(OURS)

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(norm_choices, "_by_operators", no_memory)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    x = torch.randn(4, 8, 6, 5)
    torch.testing.assert_close(model(x), nn.BatchNorm2d(8)(x))
    choice = of(model[0])
    assert choice.chosen == "pytorch"
    assert choice.note == "there was not enough memory to measure it"
    assert seen == []


def test_kernels_that_cannot_be_planned(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(OURS)
    monkeypatch.setattr(norm_choices, "_forms", lambda given: [])
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    assert not is_ours(model(torch.randn(4, 8, 6, 5)))
    assert of(model[0]).note == "no form of this package's kernels computes it"


def test_what_fails_is_no_error(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(OURS)

    def fails(given: Any) -> Any:
        raise ca.PlanError("NVRTC is not there")

    monkeypatch.setattr(norm_choices, "_forms", fails)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    assert not is_ours(model(torch.randn(4, 8, 6, 5)))
    assert of(model[0]).note == "it could not be measured: PlanError: NVRTC is not there"
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.randn(1, 8, 1, 1))


def test_another_threads_call_does_not_wait(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(OURS)
    in_turns: Any = norm_choices.time_in_turns
    begun, over = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return in_turns(*args, **kwargs)

    monkeypatch.setattr(norm_choices, "time_in_turns", slow)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    x = torch.randn(4, 8, 6, 5)
    first: list[Tensor] = []
    thread = threading.Thread(target=lambda: first.append(model(x)))
    thread.start()
    try:
        assert begun.wait(60)
        meanwhile = model(x)
    finally:
        over.set()
        thread.join()
    assert not is_ours(meanwhile)
    assert is_ours(first[0])
    assert is_ours(model(x))
    assert model[0].num_batches_tracked == 3


@pytest.mark.parametrize("times", [OURS, PYTORCHS], ids=["ours", "pytorch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_in_a_checkpoint(
    reentrant: bool, times: Mapping[str, float], timed: Any
) -> None:
    """The reentrant one measures without gradients first, and in its backward with them."""
    seen = timed(times)
    plain = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model = ca.convert(copy.deepcopy(plain))
    for x in data(4, 8, 6, 5):
        for one in (model, plain):
            given = x.clone().requires_grad_()
            checkpoint(one, given, use_reentrant=reentrant).square().sum().backward()
    assert len(seen) == (1 + reentrant) * (1 if times is OURS else 2)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_inference_mode(timed: Any) -> None:
    timed(OURS)
    plain = nn.BatchNorm2d(8)
    model = ca.convert(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(4, 8, 6, 5)
    with torch.inference_mode():
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected)
    assert of(model[0]).chosen == "half kept"
    assert is_ours(model(x))


def test_few_of_many_sizes_are_measured(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are computed as the nearest of these, and few of them are remembered."""
    monkeypatch.setattr(norm_choices, "_MOST_NEIGHBOURS", 6)
    model, plain = ca.convert(nn.Sequential(nn.BatchNorm2d(8))), nn.BatchNorm2d(8)
    for side in (4, 5):
        timed(PYTORCHS)
        model(torch.randn(2, 8, side, side))
    for side in (40, 50):
        timed(OURS)
        model(torch.randn(2, 8, side, side))
    plain.load_state_dict(model[0].state_dict())
    seen = timed(OURS)
    for side in (3, 6, 7, 30, 41, 45, 60, 61, 62, 3):
        x = torch.randn(2, 8, side, side)
        output = model(x)
        assert is_ours(output) == (side >= 30)
        torch.testing.assert_close(output, plain(x))
        known = norm_choices.known(
            model[0], norm_choices.signature_of(x, model[0].weight, model[0].bias, "identity", True)
        )
        assert known is not None
        assert "its sizes change" in known.note
        assert len(norm_choices._neighbours[model[0]]) <= 6
    assert seen == []
    assert len(norm_choices.choices_of(model[0])) == 4
    model(torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last))  # another layout
    assert len(seen) == 1
    torch.testing.assert_close(model[0].running_var, plain.running_var, rtol=0.1, atol=0.1)
