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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support.norms.models import NormAct, conv, data
from support.norms.served import choice_for, choice_of, is_ours, norms_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.norms import batch_norm_calls, batch_norms
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms.plan import FORMS
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

OURS = {"pytorch": 3.0, "kept": 2.0, "half kept": 1.0, "two passes": 4.0}
PYTORCHS = {"pytorch": 1.0, "kept": 2.0, "half kept": 3.0, "two passes": 4.0}


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Norms on a CPU take the way of those on a GPU, where all forms have kernels of their own."""
    monkeypatch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
    with norms_on_cpu():
        yield


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

        monkeypatch.setattr(norm_measuring, "time_in_turns", in_turns)
        return seen

    return seems


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
    assert len(norm_choices.choices_of(model[1])) == 1
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
    assert choice_of(norms[1]) is choice_of(norms[2])
    assert choice_of(norms[0]) is not choice_of(norms[1])
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


def test_modes_that_time_nothing(timed: Any) -> None:
    seen = timed(PYTORCHS)
    x = torch.randn(4, 8, 6, 5)
    by_mode = ca.convert(nn.Sequential(nn.BatchNorm2d(8)), sampling="heuristic")
    assert is_ours(by_mode(x))
    choice = choice_of(by_mode[0])
    assert (choice.chosen, choice.times_ms) == ("kept", {})
    assert choice.note == "the sampling mode times nothing"
    with ca.flags(sampling="heuristic"):
        assert is_ours(ca.convert(nn.Sequential(nn.BatchNorm2d(8)))(x))
    assert seen == []
    assert not is_ours(ca.convert(nn.Sequential(nn.BatchNorm2d(8)))(x))
    assert len(seen) == 1
    assert "sampling" not in vars(ca.revert(by_mode)[0])


@pytest.mark.parametrize(
    "plain",
    [
        nn.Sequential(nn.BatchNorm2d(8)),
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.BatchNorm2d(8), nn.GELU(approximate="tanh")),
        nn.Sequential(nn.BatchNorm2d(8, affine=False, track_running_stats=False), nn.Identity()),
        nn.Sequential(nn.BatchNorm2d(8, momentum=1), nn.Hardswish()),
        nn.Sequential(NormAct(8)),
    ],
    ids=["norm", "relu", "gelu", "nothing kept", "momentum of 1", "registered"],
)
def test_where_pytorch_is_chosen_its_numbers_are_there_bit_for_bit(
    plain: nn.Sequential, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known signature runs neither the Python of PyTorch's norm nor another measurement."""
    monkeypatch.setattr(batch_norms, "_tails", {NormAct: lambda module: [module.act]})
    seen = timed(PYTORCHS)
    model = ca.convert(copy.deepcopy(plain))
    forward, calls = nn.modules.batchnorm._BatchNorm.forward, []

    def counted(module: Any, input: Tensor) -> Tensor:
        calls.append(module)
        return forward(module, input)

    monkeypatch.setattr(nn.modules.batchnorm._BatchNorm, "forward", counted)
    for x in data(4, 8, 6, 5):
        found = []
        for one in (model, plain):
            one.zero_grad()
            given = x.clone().requires_grad_()
            output = one(given)
            output.square().sum().backward()
            found.append([output, given.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        assert found[0][0].grad_fn.name() == found[1][0].grad_fn.name()
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert calls == [plain[0]] * 3
    assert len(seen) == 1
    assert choice_of(model[0]).chosen == "pytorch"


def test_an_activation_of_a_pair_that_is_left_to_pytorch_is_called(timed: Any) -> None:
    """Also after it has got a hook, or was replaced."""
    timed(PYTORCHS)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True)))
    x = torch.randn(4, 8, 6, 5)
    for _ in range(2):
        assert model(x).min() == 0
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    assert model(x) is seen[0]
    model[1] = nn.LeakyReLU(0.5)
    assert model(x).min() < -0.5
    assert model[0].num_batches_tracked == 4


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
        choice = choice_for(norm, x, activation)
        assert choice.chosen == "half kept", choice
        assert not choice.rejected


@pytest.mark.parametrize(
    "input",
    [
        torch.full((4, 8, 6, 5), math.nan),
        torch.full((4, 8, 6, 5), math.inf),
        torch.zeros(4, 8, 6, 5),
        torch.ones(4, 8, 6, 5),
        torch.arange(960.0).index_fill(0, torch.tensor(251), math.nan).view(4, 8, 6, 5),
    ],
    ids=["NaN", "infinity", "zeros", "ones", "one NaN"],
)
def test_inputs_that_tell_nothing(input: Tensor, timed: Any) -> None:
    """The choice is that of other inputs; the results are PyTorch's, and NaN where those are."""
    timed(OURS)
    plain = nn.BatchNorm2d(8)
    model = ca.convert(nn.Sequential(copy.deepcopy(plain)))
    found, expected = model(input), plain(input)
    assert is_ours(found)
    assert not choice_of(model[0]).rejected
    torch.testing.assert_close(found, expected, equal_nan=True)
    buffers = zip(model.buffers(), plain.buffers(), strict=True)
    for one, other in buffers:
        assert torch.equal(one.isfinite(), other.isfinite())


def test_a_callers_seed_does_not_draw_the_gradient() -> None:
    """The input as its own gradient has a gradient of zero, of which rounding is all that is
    left."""
    torch.manual_seed(0)
    input = torch.randn(2, 64, 16, 16)
    *_, random = norm_measuring.measured_on(input, None, None)
    both = torch.stack([input.flatten(), random(input).flatten()])
    assert torch.corrcoef(both)[0, 1].abs() < 0.1


def test_parameters_that_tell_nothing(timed: Any) -> None:
    """The last norm of a residual block often begins with weights of zero."""
    timed(OURS)
    norm = nn.BatchNorm2d(8)
    nn.init.zeros_(norm.weight)
    model = ca.convert(nn.Sequential(norm))
    assert is_ours(model(torch.randn(4, 8, 6, 5)))
    assert not choice_of(norm).rejected
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
        (1, False, "statistics"),
        (3, False, "statistics"),
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
    monkeypatch.setattr(batch_norm_calls, "_operators", _Wrong(place, backward, factor))
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    (x,) = data(4, 8, 6, 5, count=1)
    output = model(x.requires_grad_())
    assert not is_ours(output)
    choice = choice_of(model[0])
    assert choice.chosen == "pytorch"
    assert choice.note == "no form of this package's kernels computes it"
    assert set(choice.rejected) == set(FORMS)
    assert all(why.startswith(f"is wrong: {name} has a") for why in choice.rejected.values())
    assert seen == []


def test_a_form_that_fails_is_left_out(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(OURS)
    by_operators = batch_norm_calls._by_operators

    def fails(given: Any, form: Any, adopts: bool = False) -> Any:
        if form == "half kept":
            raise RuntimeError("a kernel was not loaded\nat some place")
        return by_operators(given, form, adopts)

    monkeypatch.setattr(batch_norm_calls, "_by_operators", fails)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    assert is_ours(model(torch.randn(4, 8, 6, 5)))
    choice = choice_of(model[0])
    assert choice.chosen == "kept"
    assert choice.rejected == {"half kept": "fails: RuntimeError: a kernel was not loaded"}
    assert seen == [{"pytorch", "kept", "two passes"}]


def test_without_memory_it_is_pytorchs(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(OURS)

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(batch_norm_calls, "_by_operators", no_memory)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    x = torch.randn(4, 8, 6, 5)
    torch.testing.assert_close(model(x), nn.BatchNorm2d(8)(x))
    choice = choice_of(model[0])
    assert choice.chosen == "pytorch"
    assert choice.note == "there was not enough memory to measure it"
    assert seen == []


def test_what_fails_is_no_error(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(OURS)

    def fails(given: Any) -> Any:
        raise ca.PlanError("NVRTC is not there")

    monkeypatch.setattr(norm_measuring, "_forms", fails)
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    assert not is_ours(model(torch.randn(4, 8, 6, 5)))
    assert choice_of(model[0]).note == "it could not be measured: PlanError: NVRTC is not there"
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.randn(1, 8, 1, 1))


def test_another_threads_call_does_not_wait(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(OURS)
    in_turns: Any = norm_measuring.time_in_turns
    begun, over = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return in_turns(*args, **kwargs)

    monkeypatch.setattr(norm_measuring, "time_in_turns", slow)
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
    """The reentrant one measures without gradients first, and in its backward with them. The other
    one leaves norms to PyTorch."""
    seen = timed(times)
    plain = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model = ca.convert(copy.deepcopy(plain))
    for x in data(4, 8, 6, 5):
        for one in (model, plain):
            given = x.clone().requires_grad_()
            checkpoint(one, given, use_reentrant=reentrant).square().sum().backward()
    assert len(seen) == 2 * reentrant
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_choices_go_with_their_module(timed: Any) -> None:
    """Another module may get the memory of one that is gone."""
    x = torch.randn(4, 8, 6, 5)
    for times in (OURS, PYTORCHS) * 20:
        seen = timed(times)
        model = ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
        for _ in range(2):
            assert is_ours(model(x)) == (times is OURS)
        assert len(seen) == 1
        norm_choices._memory.clear()
        del model


def test_a_norm_that_computes_a_graph_twice_by_both(timed: Any) -> None:
    """PyTorch's node has saved the running statistics that the operator updates after it."""
    norms = [ca.convert(nn.Sequential(nn.BatchNorm2d(8))), nn.BatchNorm2d(8)]
    first, second = data(4, 8, 6, 5, count=2)
    gradients = []
    for norm in norms:
        inputs = [first.clone().requires_grad_(), second[:3].clone().requires_grad_()]
        timed(PYTORCHS)
        outputs = [norm(inputs[0])]
        timed(OURS)
        outputs.append(norm(inputs[1]))
        if norm is norms[0]:
            assert [is_ours(output) for output in outputs] == [False, True]
        sum(output.square().sum() for output in outputs).backward()
        gradients.append([input.grad for input in inputs])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
