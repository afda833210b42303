"""Training by ``torch.compile(model, backend="cudnn_autotune")`` with norms as operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.made import Made
from support.norms.models import (
    Activated,
    Dense,
    Projected,
    Residual,
    SqueezeExcite,
    check_steps,
    data,
    errors,
    train,
)
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.compile import compiled_graph, entry, training_graph
from cudnn_autotune.compile.comparison import Comparison
from cudnn_autotune.compile.training_graph import WITHOUT_NORMS

OURS = "cudnn_autotune"
SERVED = {"norms": "always", "cpp.weight_prepack": False}


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU are compiled as if they were on a GPU, and measured as there."""
    monkeypatch.setattr(entry, "_why_plain", lambda *_: None)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**SERVED, **options})


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("make", [Residual, Projected, SqueezeExcite])
@pytest.mark.basic(2)
def test_a_model_trains_as_it_does(
    make: Callable[[], nn.Module], layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = make().to(memory_format=layout)
    inputs = [one.to(memory_format=layout) for one in data(4, 8, 6, 5)]
    check_steps(model, inputs, compiled)
    assert last().mode == "training"
    assert last().norms
    assert all(report.is_served for report in last().norms)
    assert {report.reason for report in last().norms} == {"it was asked for"}


@pytest.mark.slow
def test_it_says_what_became_of_each_norm() -> None:
    model = Residual()
    model.norm2.running_mean = model.norm2.running_var = None
    model.norm.eval()
    compiled(model)(torch.randn(4, 8, 6, 5)).sum().backward()
    (report,) = last().norms
    assert str(report) == "norm + residual + relu of 4x8x6x5: served, it was asked for"


def code(model: nn.Module, input: Tensor, **options: Any) -> tuple[str, str]:
    """The code that Inductor generates for forward and backward."""

    def step() -> None:
        compiled(model, **options)(input).sin().sum().backward()

    _, codes = run_and_get_code(step)
    forward, backward = (one[one.index("def call(") : one.index("get_args")] for one in codes)
    return forward, backward


def test_the_backward_adds_the_gradients_of_a_residual_block() -> None:
    model = nn.Sequential(Residual(), Residual())
    _, backward = code(model, torch.randn(4, 8, 6, 5, requires_grad=True))
    calls = [
        line.partition("default(")[2].split(", ")
        for line in backward.splitlines()
        if "batch_norm_act_backward.default(" in line
    ]
    # The input of the second block is what the last norm of the first one computes.
    assert [call[1] != "None" for call in calls] == [False, False, True, False]
    assert backward.count("cpp_fused_add") == 1  # for the input


@pytest.mark.slow
@pytest.mark.parametrize("apply", [torch.sin, lambda y: y], ids=["computed", "a slice"])
def test_inductor_adds_what_it_computes_and_slices(apply: Callable[[Tensor], Tensor]) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = model.norm(model.first(x)).relu()
        return torch.cat([model.last(y), apply(y)], 1)

    layers = {"first": nn.Conv2d(8, 8, 3, bias=False), "last": nn.Conv2d(8, 4, 1)}
    model = Made(forward, norm=nn.BatchNorm2d(8), **layers)
    _, backward = code(model, torch.randn(4, 8, 6, 5))
    (call,) = (line for line in backward.splitlines() if "batch_norm_act_backward.default(" in line)
    assert call.partition("default(")[2].split(", ")[1] == "None"


@pytest.mark.slow
@pytest.mark.parametrize("forced", [False, True])
def test_norms_compute_in_the_layout_of_the_convolutions(forced: bool) -> None:
    options = {"force_layout_optimization": True} if forced else {"layout_optimization": False}
    model = nn.Sequential(Residual(), Residual())
    input = torch.randn(4, 8, 6, 5, requires_grad=True)
    for text in code(model, input, **options):
        sizes = [
            line for line in text.splitlines() if "batch_norm_act" in line and "(4, 8," in line
        ]
        strides = "(240, 1, 40, 8)" if forced else "(240, 30, 5, 1)"
        assert sizes
        assert all(strides in line for line in sizes)


def saved_bytes(call: Callable[[Tensor], Tensor], input: Tensor, model: nn.Module) -> int:
    """How many bytes are kept for the backward, parameters and the input aside."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call(input)
    for tensor in (input, *model.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    output.sum().backward()
    return sum(kept.values())


def kept_bytes(model: nn.Module, input: Tensor) -> dict[str, int]:
    """The bytes of :func:`saved_bytes`, by whether norms are operators."""
    kept = {}
    for norms in ("never", "always"):
        torch._dynamo.reset()
        kept[norms] = saved_bytes(compiled(model, norms=norms), input, model)
    return kept


class Halves(nn.Module):
    """A detector's block: one half of the channels passes a convolution."""

    def __init__(self, is_split: bool = True) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.SiLU()
        self.last, self.is_split = nn.Conv2d(8, 4, 3, padding=1), is_split

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        one, other = y.chunk(2, 1) if self.is_split else (y[:, :8], y[:, 8:])
        return torch.cat([one, self.last(other)], 1)


class Slices(Halves):
    def __init__(self) -> None:
        super().__init__(is_split=False)


@pytest.mark.parametrize("make", [Halves, Slices])
@pytest.mark.basic(1)
def test_a_part_of_a_norm_is_computed_again(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make(), nn.Conv2d(12, 8, 1))
    check_steps(model, data(4, 8, 6, 5), compiled)
    kept = kept_bytes(model, torch.randn(4, 8, 16, 16))
    assert kept["always"] <= kept["never"] + 1024, kept


@pytest.mark.basic(1)
@pytest.mark.parametrize("make", [Residual, Projected, SqueezeExcite, Dense])
def test_no_more_is_kept_for_the_backward(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make(), nn.Conv2d(16 if make is Dense else 12, 8, 1))
    if make in (Residual, SqueezeExcite):
        model = nn.Sequential(make(), nn.Conv2d(8, 8, 1))
    input = torch.randn(4, 8, 16, 16)
    kept = kept_bytes(model, input)
    # Statistics of a channel may be kept in one more form.
    assert kept["always"] <= kept["never"] + 1024, kept


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return model.last(checkpoint(model.block, x, use_reentrant=False))


@pytest.mark.slow
def test_a_checkpoint_updates_statistics_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Made(checkpointed, block=Residual(), last=Residual())
    expected, inputs = copy.deepcopy(model), data(4, 8, 6, 5)
    # Outside of a compiler a checkpoint updates them twice.
    monkeypatch.setattr(expected, "forward", lambda x: expected.last(expected.block(x)))
    steps = train(compiled(model), inputs, of=model)
    assert max(errors(steps, train(expected, inputs)).values()) < 1e-4
    assert [report.text for report in last().norms] == ["norm + relu", "norm + residual + relu"]
    assert model.block.norm.num_batches_tracked == 3


class WritesLater(nn.Module):
    """A block whose residual is written into once its norm has read it, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Residual(), Residual()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        other = y * 2
        z = nn.functional.silu(self.norm(self.conv(y)) + other)
        other.add_(1)
        result: Tensor = self.last(z) + other
        return result


@pytest.mark.slow
def test_a_residual_that_is_written_later_costs_its_norm_the_activation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_steps(WritesLater(), data(4, 8, 6, 5), compiled)
    assert last().note == ""
    assert "Traceback" not in caplog.text
    ends = ["norm + relu", "norm + residual + relu"]
    assert [report.text for report in last().norms] == [*ends, "norm + residual", *ends]
    assert all(report.is_served for report in last().norms)


def test_converted_models() -> None:
    check_steps(Residual(), data(4, 8, 6, 5), lambda one: compiled(ca.convert(one)))
    assert [report.is_served for report in last().norms] == [True, True]


def test_a_backward_of_compiled_autograd_with_a_checkpoint(on_cpu: None) -> None:
    """It convolves again, and its inputs are a list that its first run empties."""
    model = Made(
        lambda model, x: checkpoint(lambda x: model.conv(x).sin(), x, use_reentrant=False),
        conv=nn.Conv2d(4, 4, 1),
    )
    expected, ours = copy.deepcopy(model), ca.convert(model)

    def train(x: Tensor) -> None:
        ours(x).sum().backward()

    x = torch.randn(2, 4, 3, 3)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(train, backend="cudnn_autotune", options={"fuse": "always"})(x)
    expected(x).sum().backward()
    for one, other in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert last().note == "its inputs are a list, as in a backward of compiled autograd"


def test_a_value_that_is_not_allowed() -> None:
    with pytest.raises(Exception, match=r"options\['norms'\] must be one of 'measure', 'always'"):
        compiled(Residual(), norms=True)(torch.randn(4, 8, 6, 5))


@pytest.mark.usefixtures("like_a_gpu")
class TestMeasured:
    def test_the_faster_program_runs_and_the_model_stays_what_it_was(self) -> None:
        model = Residual()
        calls: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(calls.append)
        model.norm.running_mean.fill_(3)  # type: ignore[union-attr]
        before = copy.deepcopy(model.state_dict())
        seed = torch.random.get_rng_state()
        input = torch.randn(4, 8, 6, 5, requires_grad=True)
        torch.random.set_rng_state(seed)
        call = compiled(model, norms="measure")
        output = call(input)
        assert torch.equal(torch.random.get_rng_state(), seed)
        expected = copy.deepcopy(model)
        expected.load_state_dict(before)
        torch.testing.assert_close(output, expected(input))
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        assert calls == []
        assert input.grad is None
        assert set(last().times_ms) == {OURS, WITHOUT_NORMS}
        assert last().chosen == min(last().times_ms, key=last().times_ms.__getitem__)
        for report in last().norms:
            assert report.is_served == (last().chosen == OURS)
            assert "ms with norms" in report.reason
        output.sum().backward()
        assert len(calls) == len(list(model.parameters()))

    def test_a_converted_model_is_measured_too(self, on_cpu: None) -> None:
        """Its convolutions are PyTorch's operators with a mark. They write into nothing."""
        compiled(ca.convert(Residual()), norms="measure")(torch.randn(4, 8, 6, 5)).sum().backward()
        assert set(last().times_ms) == {OURS, WITHOUT_NORMS}, last().note

    @pytest.mark.basic(1)
    @pytest.mark.parametrize("loser", [OURS, WITHOUT_NORMS])
    def test_either_may_win(self, loser: str, monkeypatch: pytest.MonkeyPatch) -> None:
        compare = compiled_graph.compare

        def slowed(*arguments: Any) -> Comparison:
            found = compare(*arguments)
            assert found.wrong == {}
            times = {name: 9.0 if name == loser else 1.0 for name in found.times_ms}
            return Comparison(times, {}, {})

        monkeypatch.setattr(compiled_graph, "compare", slowed)
        check_steps(Residual(), data(4, 8, 6, 5), lambda one: compiled(one, norms="measure"))
        assert {report.is_served for report in last().norms} == {loser != OURS}
        assert last().chosen == (WITHOUT_NORMS if loser == OURS else OURS)

    def test_captures_have_a_choice_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            compiled_graph,
            "compare",
            lambda *_: Comparison(
                {OURS: 2.0, WITHOUT_NORMS: 1.0}, {OURS: 1.0, WITHOUT_NORMS: 2.0}, {}
            ),
        )
        model = Residual()
        compiled(model, norms="measure")(torch.randn(4, 8, 6, 5))
        assert (last().chosen, last().chosen_in_captures) == (WITHOUT_NORMS, OURS)

    @pytest.mark.slow
    def test_nothing_is_compared_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Residual()
        call = compiled(model, norms="measure")
        with monkeypatch.context() as capture:
            capture.setattr(training_graph, "is_capturing", lambda: True)
            call(torch.randn(4, 8, 6, 5)).sum().backward()
            assert {report.reason for report in last().norms} == {"it waits to be compared"}
        call(torch.randn(4, 8, 6, 5)).sum().backward()
        assert last().times_ms
        assert model.norm.num_batches_tracked == 2

    @pytest.mark.slow
    def test_programs_do_not_wait_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled_graph, "is_within_step", lambda: True)
        call = compiled(Residual(), norms="measure")
        for step in range(12):
            call(torch.randn(4, 8, 6, 5)).sum().backward()
            assert ("not compared" in last().note) == (step >= 9)
        assert not any(report.is_served for report in last().norms)

    def test_without_memory_norms_are_pytorchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(compiled_graph, "compare", fails)
        check_steps(Residual(), data(4, 8, 6, 5), lambda one: compiled(one, norms="measure"))
        assert last().note == "not compared: there was not enough memory"

    @pytest.mark.basic(1)
    @pytest.mark.parametrize("norms", ["measure", "always"])
    def test_where_they_cannot_be_compiled_norms_are_pytorchs(
        self, norms: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        compile_training = training_graph.compile_training

        def fails(*arguments: Any, with_norms: bool, **layout: Any) -> Any:
            if with_norms:
                raise RuntimeError("no such kernel\nat all")
            return compile_training(*arguments, with_norms=False, **layout)

        monkeypatch.setattr(training_graph, "compile_training", fails)
        check_steps(Residual(), data(4, 8, 6, 5), lambda one: compiled(one, norms=norms))
        assert last().note == "no norms: no such kernel"
        assert last().note in caplog.text
        assert not any(report.is_served for report in last().norms)

    def test_a_graph_that_writes_into_its_input_is_not_compared(self) -> None:
        class Writes(Residual):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.mul_(2))

        model, theirs = Writes(), Writes()
        theirs.load_state_dict(model.state_dict())
        input = torch.randn(4, 8, 6, 5)
        output = compiled(model, norms="measure")(input.clone())
        torch.testing.assert_close(output, theirs(input.clone()))
        assert last().note == "not compared: the graph writes into its inputs"

    @pytest.mark.slow
    def test_a_graph_with_a_checkpoint_is_not_compared(self) -> None:
        compiled(Made(checkpointed, block=Residual(), last=Residual()), norms="measure")(
            torch.randn(4, 8, 6, 5)
        ).sum().backward()
        assert last().note == "not compared: the graph writes into its inputs"
        assert not any(report.is_served for report in last().norms)

    @pytest.mark.parametrize("is_free", [True, False])
    def test_a_checkpoint_around_it_runs_one_program(
        self, is_free: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tensors that its forward and its recomputation save are compared."""
        first = iter([not is_free])
        monkeypatch.setattr(compiled_graph, "is_within_step", lambda: next(first, False))
        compare = compiled_graph.compare
        fast = {OURS: 1.0, WITHOUT_NORMS: 2.0}
        monkeypatch.setattr(
            compiled_graph, "compare", lambda *given: replace(compare(*given), times_ms=fast)
        )

        def prepare(one: nn.Module) -> Callable[[Tensor], Tensor]:
            call = compiled(one, norms="measure")
            return lambda x: checkpoint(call, x, use_reentrant=False)  # type: ignore[return-value]

        model = Activated(nn.functional.relu, track_running_stats=False)
        check_steps(model, data(4, 8, 6, 5), prepare)
        note = "not compared: a checkpoint has to run the same program again"
        assert last().note == ("" if is_free else note)
        assert bool(last().times_ms) == is_free

    def test_without_comparison_norms_are_served(self) -> None:
        compiled(Residual(), norms="measure", compare=False)(torch.randn(4, 8, 6, 5))
        assert {report.reason for report in last().norms} == {"nothing is compared"}
        assert last().times_ms == {}

    @pytest.mark.slow
    def test_dropout_draws_the_same_numbers(self) -> None:
        model = nn.Sequential(Residual(), nn.Dropout(0.5), Residual())
        call = compiled(model, norms="measure")
        call(torch.randn(4, 8, 6, 5)).sum().backward()
        assert last().note == ""
        assert len(last().times_ms) == 2


class FrozenTail(nn.Module):
    """A trained norm, and behind it what is not trained: a convolution and a norm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.frozen, self.fixed = nn.Conv2d(4, 4, 3).requires_grad_(False), nn.BatchNorm2d(4).eval()
        self.register_buffer("scale", torch.ones(1, 3, 1, 1).expand(2, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.frozen(torch.relu(self.norm(self.conv(x * self.scale)))))


@pytest.mark.usefixtures("like_a_gpu")
def test_a_comparison_writes_into_no_frozen_tensor() -> None:
    """An earlier forward whose backward is to come has saved them; one of them is expanded."""
    model = FrozenTail()
    written = model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked
    before = {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()}
    call = compiled(model, norms="measure")
    loss = call(torch.randn(2, 3, 8, 8)).sum() + call(torch.randn(2, 3, 12, 12)).sum()
    loss.backward()
    assert model.norm.num_batches_tracked.item() == 2
    changed = {
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor._version != before[name] and not any(tensor is one for one in written)
    }
    assert changed == set()


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("chosen", [OURS, WITHOUT_NORMS])
def test_a_backward_after_a_comparison_leaves_what_is_still_needed(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, and what a further backward needs, if the caller retains it."""
    compare = compiled_graph.compare

    def slowed(*arguments: Any) -> Comparison:
        found = compare(*arguments)
        assert found.wrong == {}
        return Comparison({name: 1.0 + (name != chosen) for name in found.times_ms}, {}, {})

    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = model.up(model.norm(model.conv(x)))
        return y, y.abs().mean(), y.detach()

    monkeypatch.setattr(compiled_graph, "compare", slowed)
    torch.manual_seed(0)
    parts = {"conv": nn.Conv1d(8, 8, 3, padding=1), "norm": nn.BatchNorm1d(8)}
    model = Made(forward, **parts, up=nn.ConvTranspose1d(8, 8, 4, 2, 1))
    output, mean, detached = compiled(model, norms="measure")(torch.randn(2, 8, 20))
    assert last().chosen == chosen
    kept, weights = output.detach().clone(), [*model.parameters()]
    before = [weight.detach().clone() for weight in weights]
    loss = output.sin().sum() + mean
    first, second = (torch.autograd.grad(loss, weights, retain_graph=one) for one in (True, False))
    torch.testing.assert_close(first, second)
    assert torch.equal(output, kept)
    assert torch.equal(detached, kept)
    assert all(map(torch.equal, weights, before))
