"""``torch.compile(model, backend="cudnn_autotune")``, as far as no GPU is needed.

On the CPU nothing is fused by itself, so that most tests ask for it. Inductor's own packing of
weights, which takes convolutions away before groups are looked for, is off.
"""

from __future__ import annotations

import copy
import logging
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import checkout
from support.conv.fused_cases import FUNCTIONS, NAMES
from support.conv.references import TOLERANCES, assert_close
from support.models.made import Block, Made
from support.processes.subprocesses import evaluate
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.cudagraph_trees import MarkStepBox
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.two_tensor import TwoTensor

import cudnn_autotune as ca
from cudnn_autotune.compile import (
    compiled_graph,
    entry,
    formulas,
    graph_copies,
    judges,
    layouts,
    programs,
)
from cudnn_autotune.compile.comparison import Comparison
from cudnn_autotune.compile.frozen_weights import FrozenWeights

FUSED = {"fuse": "always", "cpp.weight_prepack": False, "compare": False}


class Chain1d(nn.Module):
    """1-d convolutions of all kinds, what keeps a layout between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(5, 8, 5, padding=2)
        self.depthwise = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.pointwise, self.norm = nn.Conv1d(8, 6, 1, bias=False), nn.BatchNorm1d(6)
        self.up = nn.ConvTranspose1d(6, 4, 4, 2, 1)
        self.last = nn.Conv1d(4, 4, 3, padding=1)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(F.leaky_relu(self.first(x), 0.1))
        y = self.up(F.relu(self.norm(self.pointwise(y))))
        return torch.tanh(self.last(F.leaky_relu(y, 0.1)) + y)


@torch.library.custom_op("cudnn_autotune_tests::in_memory", mutates_args=())
def in_memory(x: Tensor) -> Tensor:
    """The numbers of a dense tensor in the order in which they lie in memory."""
    return x.as_strided((x.numel(),), (1,)).clone()


@in_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


TEXTS = ["conv + bias + {}", "conv + bias", "conv + bias + residual + {}"]


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**FUSED, **options})


def formats_of_groups(monkeypatch: pytest.MonkeyPatch) -> list[torch.memory_format]:
    """Fuses every group, and returns a list that gets the layout of each."""
    formats: list[torch.memory_format] = []

    def judge(group: Any) -> Any:
        formats.append(group.problem().memory_format)
        return judges.always(group)

    monkeypatch.setitem(judges.JUDGES, "always", lambda: judge)  # type: ignore[arg-type]
    return formats


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.fixture
def block() -> nn.Module:
    return Block().eval()


@pytest.fixture
def input() -> Tensor:
    return torch.randn(2, 12, 9, 8)


@pytest.mark.basic(1)
@pytest.mark.parametrize("activation", NAMES)
def test_groups_are_fused_and_batch_norms_folded(activation: str, input: Tensor) -> None:
    model = Block(FUNCTIONS[activation]).eval()
    expected = copy.deepcopy(model).double()(input.double())
    with torch.no_grad():
        output, codes = run_and_get_code(compiled(model), input)
    assert_close(output, expected, TOLERANCES[torch.float32])
    assert [group.text for group in last().fused] == [text.format(activation) for text in TEXTS]
    assert not last().is_frozen
    assert codes[0].count("conv_fused.default(") == 3


@pytest.mark.basic(1)
@pytest.mark.parametrize(("dims", "freezing"), [(1, False), (2, False), (2, True), (3, False)])
def test_prelu_follows_its_slopes(dims: int, freezing: bool) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(conv(4, 8, 3), nn.PReLU(8), conv(8, 6, 3), nn.PReLU()).eval()
    nn.init.normal_(model[1].weight)
    x = torch.randn(2, 4, *[9] * dims)
    program = compiled(model, freezing=freezing)
    with torch.no_grad():
        for _ in range(2):
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(program(x), expected, TOLERANCES[torch.float32])
            texts = [group.text for group in last().groups]
            assert texts == ["conv + bias + prelu", "conv + bias"]
            model[1].weight.neg_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elu_by_default_of_which_inductor_removes_alpha(input: Tensor, dtype: torch.dtype) -> None:
    model, input = Block(F.elu).eval().to(dtype), input.to(dtype)
    expected = copy.deepcopy(model).double()(input.double())
    with torch.no_grad():
        output = compiled(model)(input)
    assert_close(output, expected, 3 * TOLERANCES[dtype])
    assert [group.text for group in last().fused] == [text.format("elu(1)") for text in TEXTS]


@pytest.mark.basic(1)
@pytest.mark.parametrize(("dtype", "freezing"), [(torch.float32, True), (torch.float16, False)])
def test_a_scaled_branch_is_added_to_its_residual(dtype: torch.dtype, freezing: bool) -> None:
    """ESRGAN has such branches."""

    def forward(model: Any, x: Tensor) -> Tensor:
        y = F.leaky_relu(model.first(x), 0.2)
        return model.last(torch.cat((x, y), 1)) * 0.2 + x

    first, last_conv = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
    model = Made(forward, first=first, last=last_conv).eval().to(dtype)
    input = torch.randn(2, 8, 9, 8).to(dtype)
    expected = copy.deepcopy(model).double()(input.double())
    program = compiled(model, freezing=freezing)
    with torch.no_grad():
        output, codes = run_and_get_code(program, input)
        assert_close(output, expected, 2 * TOLERANCES[dtype])
        assert [group.text for group in last().fused] == [
            "conv + bias + leaky_relu(0.2)",
            "conv + bias + residual",
        ]
        assert codes[0].count("conv_fused.default(") == 2
        assert "aten.full" not in codes[0]  # the number is a part of the kernel that folds it
        model.last.weight.zero_()
        model.last.bias.fill_(5)
        torch.testing.assert_close(program(input), input + 1)


def test_constant_weights_are_folded_once(block: nn.Module, input: Tensor) -> None:
    with torch.no_grad():
        output, codes = run_and_get_code(compiled(block, freezing=True), input)
        torch.testing.assert_close(output, block(input))
    assert [group.text for group in last().fused] == [text.format("relu") for text in TEXTS]
    assert last().is_frozen
    assert codes[0].count("conv_fused.default(") == 3
    assert "batch_norm" not in codes[0]


@pytest.mark.basic(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_operands_are_in_the_layout_of_the_graph_with_one_copy_at_most(
    layout: torch.memory_format, block: nn.Module, input: Tensor
) -> None:
    block, input = block.to(memory_format=layout), input.to(memory_format=layout)
    with torch.no_grad():
        output, codes = run_and_get_code(compiled(block), input)
        torch.testing.assert_close(output, block(input))
    # One copy of the input, for two convolutions; that of the output lies in the same memory.
    copies = 0 if layout == torch.channels_last else 1
    assert codes[0].count("empty_strided_cpu((2, ") == copies
    assert output.stride() == block(input).stride()


def test_a_bias_that_is_alone_and_a_value_that_is_used_elsewhere(input: Tensor) -> None:
    model = Made(
        lambda model, x: ((y := model.first(x)).relu() + x, model.second(y).exp()),
        first=nn.Conv2d(12, 12, 1),
        second=nn.Conv2d(12, 12, 1, bias=False),
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(input), model(input))
    first, second = last().groups
    assert (first.text, first.is_fused) == ("conv + bias", True)
    assert (second.text, second.is_fused) == ("conv", False)
    assert "no bias, residual or activation" in second.reason
    assert second.output_shape == (2, 12, 9, 8)


def test_nothing_is_fused_where_it_is_not_asked_for(block: nn.Module, input: Tensor) -> None:
    with torch.no_grad():
        torch.compile(block, backend="cudnn_autotune")(input)
        assert last().mode == "plain"
        assert last().note == "no tensor is on a CUDA device"
        torch._dynamo.reset()
        torch.compile(nn.Linear(8, 8), backend="cudnn_autotune")(input)
        assert last().note == "the graph has no convolution"


class TestFrozenWeights:
    """Weights are constants of the program, and may change all the same."""

    def change_in_place(model: Any) -> None:
        with torch.no_grad():
            model.first.weight.mul_(-2)

    def load(model: Any) -> None:
        model.load_state_dict(Block().state_dict())

    def replace(model: Any) -> None:
        model.second.weight = nn.Parameter(torch.randn_like(model.second.weight))

    def replace_data(model: Any) -> None:
        model.first.weight.data = torch.randn_like(model.first.weight)

    def change_statistics(model: Any) -> None:
        model.norm.running_mean += 1

    def step(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    CHANGES = (change_in_place, load, replace, replace_data, change_statistics, step)

    @pytest.mark.basic(1)
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_change_is_seen_by_the_next_call(
        self, change: Callable[[Any], None], block: nn.Module, input: Tensor
    ) -> None:
        model = compiled(block, freezing=True)
        with torch.no_grad():
            before = model(input)
        change(block)
        with torch.no_grad():
            expected = block(input)
            assert (expected - before).abs().max() > 0.01
            torch.testing.assert_close(model(input), expected)

    def test_new_data_at_the_address_of_freed_data_is_a_change(self) -> None:
        memory = np.ones(3, dtype=np.float32)
        weight = nn.Parameter(torch.from_numpy(memory))
        frozen = FrozenWeights([0], [weight])
        assert frozen.are_those_of([weight])
        weight.data = torch.empty(0)
        memory *= 2
        weight.data = torch.from_numpy(memory)
        assert not frozen.are_those_of([weight])

    @pytest.mark.slow
    def test_after_many_changes_they_are_constants_no_more(
        self, block: Any, input: Tensor, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = compiled(block, freezing=True)
        with torch.no_grad(), caplog.at_level(logging.INFO, "cudnn_autotune"):
            for change in range(7):
                torch.testing.assert_close(model(input), block(input))
                assert last().is_frozen == (change <= 3)
                block.first.weight.mul_(1.1)
        assert caplog.text.count("it is compiled again") == 3
        told = "as Inductor makes it: its weights have changed more than 3 times"
        assert caplog.text.count(told) == 1

    @pytest.mark.slow
    def test_a_graph_that_changes_its_weights_has_no_constants(self, input: Tensor) -> None:
        ours, theirs = Block(), Block()
        theirs.load_state_dict(ours.state_dict())
        model = compiled(ours, compare=True, freezing=True)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(input), theirs(input))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        assert not last().is_frozen
        assert last().note == "not compared: the graph writes into its inputs"

    @pytest.mark.slow
    @pytest.mark.parametrize("compare", [False, True])
    def test_nothing_is_compiled_while_a_cuda_graph_is_captured(
        self, compare: bool, block: Any, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = compiled(block, freezing=True, compare=compare)
        with torch.no_grad():
            model(input)
            record, compiled_once = last(), len(ca.compilations())
            block.first.weight.mul_(-2)
            with monkeypatch.context() as capture:
                for module in (entry, compiled_graph):
                    capture.setattr(module, "is_capturing", lambda: True)
                for name in ("compile_fused", "compile_frozen", "compile_plain"):
                    capture.setattr(compiled_graph, name, None)
                torch.testing.assert_close(model(input), block(input))
                torch._dynamo.reset()
                again = compiled(block, freezing=True)
                torch.testing.assert_close(again(input), block(input))
                assert "while a CUDA graph was captured" in last().note
            assert record.is_frozen or compare
            assert len(ca.compilations()) == compiled_once + 1
            torch.testing.assert_close(model(input), block(input))

    @pytest.mark.basic(2)
    @pytest.mark.parametrize(
        ("dims", "channels", "options"),
        [
            (1, (6, 6), {"dilation": 2}),
            (2, (6, 6), {"bias": False}),
            (2, (6, 6), {"groups": 2, "output_padding": 1}),
            (2, (6, 9), {"groups": 3}),
            (2, (6, 3), {"bias": False}),
            (3, (4, 4), {"groups": 4}),
        ],
    )
    def test_what_scales_a_transposed_convolution(
        self, dims: int, channels: tuple[int, int], options: dict[str, Any]
    ) -> None:
        """Inductor would scale its input channels, of the operator by itself too."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = getattr(nn, f"Conv{dims}d")(channels[0], channels[0], 1)
                transposed = getattr(nn, f"ConvTranspose{dims}d")
                self.layers = nn.ModuleList(
                    transposed(*channels, 3, stride=2, **options) for _ in range(2)
                )
                norms = [getattr(nn, f"BatchNorm{dims}d")(channels[1]) for _ in range(2)]
                self.norms = nn.ModuleList(norms)
                for norm in norms:
                    for tensor in (norm.weight, norm.bias, norm.running_mean):
                        nn.init.normal_(tensor)
                    nn.init.uniform_(norm.running_var, 0.5, 2)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                one, other = self.layers
                lists = ([*size] for size in (one.stride, one.padding, one.dilation))
                last = (True, [*one.output_padding], one.groups)
                y = torch.ops.aten.convolution(x, one.weight, one.bias, *lists, *last)
                return self.norms[0](y) * 2.0 + self.norms[1](other(x))

        model, x = Model().eval(), torch.randn(2, channels[0], *(5,) * dims)
        with torch.no_grad():
            output = compiled(model, freezing=True)(x)
            assert last().is_frozen
            assert_close(output, model.double()(x.double()), TOLERANCES[torch.float32])

    @pytest.mark.slow
    def test_the_model_keeps_its_own(self, block: nn.Module, input: Tensor) -> None:
        parameters = dict(block.named_parameters())
        before = copy.deepcopy(block.state_dict())
        with torch.no_grad():
            compiled(block, compare=True, freezing=True)(input)
        for name, parameter in block.named_parameters():
            assert parameter is parameters[name]
        torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)


class TestComparison:
    def test_the_fastest_program_runs(
        self, block: nn.Module, input: Tensor, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = compiled(block, compare=True, freezing=True)
        with torch.no_grad(), caplog.at_level(logging.INFO, "cudnn_autotune"):
            for _ in range(3):
                torch.testing.assert_close(model(input), block(input))
        times = last().times_ms
        assert list(times) == ["inductor", "cudnn_autotune", "inductor, frozen"]
        assert last().chosen == min(times, key=times.__getitem__)
        assert (last().chosen_in_captures, last().gpu_times_ms) == (last().chosen, {})
        assert caplog.text.count("a compiled graph: Compilation(") == 1

    @pytest.mark.parametrize("trouble", ["", "other outputs", "no memory"])
    def test_where_the_groups_decide_plain_inductor_is_not_compiled(
        self, trouble: str, block: nn.Module, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outputs are compared with PyTorch's. If they differ, or there is not enough memory for
        PyTorch, programs are compared as usual."""
        verdict = judges.Verdict(True, "for a test", fused_ms=1.0, several_ms=1.3)
        monkeypatch.setitem(judges.JUDGES, "always", lambda: lambda group: verdict)
        compare = compiled_graph.compare
        seen: list[list[str]] = []

        def compared(programs: Any, *rest: Any) -> Any:
            seen.append(list(programs))
            if trouble == "no memory" and "pytorch" in programs:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if trouble and "pytorch" in programs:
                programs = {**programs, "cudnn_autotune": lambda *given: [given[0] * torch.nan]}
            return compare(programs, *rest)

        monkeypatch.setattr(compiled_graph, "compare", compared)
        # Times of a CPU tell nothing.
        times = {"pytorch": 2.0, "inductor": 3.0, "cudnn_autotune": 1.0}
        monkeypatch.setattr(
            "cudnn_autotune.compile.comparison.time_in_turns",
            lambda programs, *_, **__: {name: times[name] for name in programs},
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(block, compare=True)(input), block(input))
        first, last_one = ["pytorch", "cudnn_autotune"], ["inductor", "cudnn_autotune"]
        assert seen == ([first, last_one] if trouble else [first])
        assert list(last().times_ms) == seen[-1]
        assert last().chosen == "cudnn_autotune"

    @pytest.mark.slow
    def test_programs_do_not_wait_for_ever_to_be_compared(
        self, block: Any, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in the second graph of a model whose first one's results are in use at each call."""
        monkeypatch.setattr(compiled_graph, "is_within_step", lambda: True)
        model = compiled(block, compare=True, freezing=True)
        with torch.no_grad():
            for call in range(12):
                torch.testing.assert_close(model(input), block(input))
                assert ("not compared" in last().note) == (call >= 9)
            monkeypatch.undo()
            block.first.weight.mul_(-2)
            torch.testing.assert_close(model(input), block(input))
        assert last().chosen == "cudnn_autotune"
        assert last().times_ms == {}

    def test_steps_are_not_marked_for_the_caller(self, block: nn.Module, input: Tensor) -> None:
        """After a mark, the CUDA graphs of other programs would begin no step by themselves."""
        with torch.no_grad():
            compiled(block, compare=True)(input)
        assert list(last().times_ms) == ["inductor", "cudnn_autotune"]
        assert MarkStepBox.mark_step_counter == 0

    def test_without_memory_to_compare_plain_inductor_runs(
        self, block: nn.Module, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(compiled_graph, "compare", fails)
        with torch.no_grad():
            torch.testing.assert_close(compiled(block, compare=True)(input), block(input))
        assert (last().chosen, last().is_frozen) == ("inductor", False)
        assert "not enough memory" in last().note

    @pytest.mark.parametrize("compare", [False, True])
    def test_where_ours_cannot_be_compiled_plain_inductor_runs(
        self,
        compare: bool,
        block: Any,
        input: Tensor,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory\nTried")

        model = compiled(block, compare=compare)
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(compiled_graph, "compile_fused", fails)
            torch.testing.assert_close(model(input), block(input))
            block.first.weight.mul_(-2)
            torch.testing.assert_close(model(input), block(input))
        assert (last().chosen, last().is_frozen) == ("inductor", False)
        assert last().note == "no cudnn_autotune: CUDA out of memory"
        assert caplog.text.count(f"runs as Inductor makes it: {last().note}") == 1

    @pytest.mark.slow
    def test_where_changed_weights_cannot_be_folded_plain_inductor_runs(
        self, block: Any, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        model = compiled(block, freezing=True)
        with torch.no_grad():
            model(input)
            assert last().is_frozen
            block.first.weight.mul_(-2)
            monkeypatch.setattr(compiled_graph, "compile_fused", fails)
            torch.testing.assert_close(model(input), block(input))
        assert (last().chosen, last().is_frozen) == ("inductor", False)

    @pytest.mark.basic(1)
    @pytest.mark.parametrize("broken", ["compile_fused", "compile_frozen"])
    def test_a_program_that_fails_does_not_run(
        self, broken: str, block: Any, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At its first call, or when it is compiled; the others are compared all the same."""
        build = getattr(compiled_graph, broken)

        def fails(*_: Any) -> Any:
            raise RuntimeError("no such kernel")

        def built(*given: Any) -> Any:
            return replace(build(*given), run=fails) if broken == "compile_fused" else fails()

        monkeypatch.setattr(compiled_graph, broken, built)
        with torch.no_grad():
            model = compiled(block, compare=True, freezing=True)
            torch.testing.assert_close(model(input), block(input))
        left = {"inductor", "inductor, frozen", "cudnn_autotune"}
        left -= {"cudnn_autotune" if broken == "compile_fused" else "inductor, frozen"}
        assert set(last().times_ms) == left
        assert "no such kernel" in last().note

    def test_the_random_numbers_are_the_callers(self, input: Tensor) -> None:
        model = nn.Sequential(nn.Conv2d(12, 12, 1), nn.ReLU(), nn.Dropout())
        with torch.no_grad():
            state = torch.get_rng_state()
            compiled(model, compare=True, fallback_random=True)(input)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            model(input)
        assert torch.equal(torch.get_rng_state(), after)


class TestLayout:
    """memory_format="auto". On a CPU Inductor makes every graph channels_last, if it may."""

    @staticmethod
    def options(other: str) -> dict[str, Any]:
        """With which the program that is not Inductor's choice is in the layout ``other``."""
        options = {"memory_format": "auto", "compare": True}
        return options if other == "contiguous" else {**options, "layout_optimization": False}

    @staticmethod
    def win(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
        """Makes the program in the layout ``other`` the fastest; outputs are compared all the
        same."""

        def compared(programs: Any, *rest: Any) -> Any:
            found = compare(programs, *rest)
            name = f"cudnn_autotune, {other}"
            assert name in found.times_ms, found.wrong
            return replace(found, times_ms={**found.times_ms, name: 0.0})

        compare = compiled_graph.compare
        monkeypatch.setattr(compiled_graph, "compare", compared)

    @pytest.mark.basic(1)
    @pytest.mark.parametrize(
        ("given", "other"),
        [
            (torch.contiguous_format, "contiguous"),
            (torch.channels_last, "contiguous"),
            (torch.contiguous_format, "channels_last"),
        ],
    )
    def test_a_program_in_the_other_layout_takes_part(
        self,
        given: torch.memory_format,
        other: str,
        block: nn.Module,
        input: Tensor,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It computes in the layout, whatever that of the model, and gives the model's strides."""
        formats = formats_of_groups(monkeypatch)
        self.win(monkeypatch, other)
        block, input = block.to(memory_format=given), input.to(memory_format=given)
        model = compiled(block, **self.options(other))
        with torch.no_grad():
            for _ in range(2):
                expected, output = block(input), model(input)
                torch.testing.assert_close(output, expected)
                assert output.stride() == expected.stride()
        first = other == "contiguous"
        layouts = [torch.contiguous_format, torch.channels_last]
        assert formats == [layouts[first]] * 3 + [layouts[not first]] * 3
        assert list(last().times_ms) == [
            *("inductor", "cudnn_autotune"),
            f"cudnn_autotune, {other}",
        ]
        assert last().chosen == f"cudnn_autotune, {other}"
        assert (len(last().fused), last().is_frozen, last().note) == (3, False, "")

    @pytest.mark.slow
    def test_outputs_of_any_dimensions_have_the_strides_of_the_model(
        self, input: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forward(model: Any, x: Tensor, volume: Tensor) -> dict[str, Tensor]:
            y = model.conv(x)
            z = model.volume(volume).relu()
            tokens = y.sigmoid().flatten(2).transpose(1, 2)
            return {"y": y.relu(), "tokens": tokens, "z": z, "part": y.tanh()[:, 2:5]}

        self.win(monkeypatch, "contiguous")
        block = Made(forward, conv=nn.Conv2d(12, 12, 3), volume=nn.Conv3d(2, 4, 3)).eval()
        volume = torch.randn(2, 2, 6, 5, 4).to(memory_format=torch.channels_last_3d)
        model = compiled(block, **self.options("contiguous"))
        with torch.no_grad():
            expected, outputs = block(input, volume), model(input, volume)
        torch.testing.assert_close(outputs, expected)
        for name, output in outputs.items():
            assert output.stride() == expected[name].stride(), name
        assert last().chosen == "cudnn_autotune, contiguous"

    @pytest.mark.parametrize(
        ("tail", "reason"),
        [
            (lambda x, y: y.view(len(y), -1), "view"),
            (lambda x, y: (x[:1], y), "an output shares memory with an input or another output"),
            (lambda x, y: (y, y[0]), "an output shares memory with an input or another output"),
        ],
    )
    def test_where_there_is_no_other_program_the_record_says_why(
        self, tail: Callable[[Tensor, Tensor], Any], reason: str, input: Tensor
    ) -> None:
        block = Made(lambda m, x: tail(x, m.conv(x).relu()), conv=nn.Conv2d(12, 12, 3)).eval()
        with torch.no_grad():
            output = compiled(block, **self.options("channels_last"))(input)
            torch.testing.assert_close(output, block(input))
        assert last().note.startswith("no cudnn_autotune, channels_last: ")
        assert reason in last().note
        assert list(last().times_ms) == ["inductor", "cudnn_autotune"]

    @pytest.mark.slow
    @pytest.mark.parametrize("freezing", [False, True])
    def test_a_chain_in_one_dimension(
        self, freezing: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All its convolutions, transposed ones too, compute in channels_last; weights are laid out
        by the program, also folded ones of one tap, and outputs are contiguous."""
        problems = []

        def judge(group: Any) -> Any:
            problems.append(group.problem())
            return judges.always(group)

        monkeypatch.setitem(judges.JUDGES, "always", lambda: judge)  # type: ignore[arg-type]
        self.win(monkeypatch, "channels_last")
        block, input = Chain1d().eval(), torch.randn(2, 5, 11)
        model = compiled(block, **self.options("channels_last"), freezing=freezing)
        with torch.no_grad():
            output, codes = run_and_get_code(model, input)
            expected = copy.deepcopy(block).double()(input.double())
            assert_close(output, expected, TOLERANCES[torch.float32])
            assert output.is_contiguous()
            block.first.weight.mul_(-2)
            torch.testing.assert_close(model(input), block(input))
        spatial = [(problem.spatial_dims, problem.memory_format) for problem in problems[:8]]
        assert spatial[:4] == [(1, torch.contiguous_format)] * 4
        assert spatial[4:] == [(2, torch.channels_last)] * 4
        assert problems[4].input_shape == (2, 5, 1, 11)
        assert (problems[5].dilation, problems[5].padding) == ((1, 2), (0, 2, 0, 2))
        # Each convolution gives what the next one takes.
        asserted = r"assert_\w+\(buf\d+, \(2, (\d+), \d+\), \((.*?)\)"
        layouts = re.findall(asserted, codes[-1])
        assert len(layouts) == 5
        assert all(strides.split(", ")[1:] == ["1", channels] for channels, strides in layouts)

    @pytest.mark.parametrize(
        ("least_ms", "others"), [(1.3, "pytorch"), (1.2, "inductor")], ids=["slower", "unknown"]
    )
    def test_plain_inductor_is_not_compiled_where_its_convolutions_alone_are_slower(
        self, least_ms: float, others: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = {"pytorch": 2.0, "inductor": 1.5, "cudnn_autotune": 1.0}

        def compared(programs: Any, *_: Any) -> Comparison:
            found = {name: times[name] for name in programs}
            return Comparison(found, found, {})

        monkeypatch.setattr(compiled_graph, "compare", compared)
        monkeypatch.setattr(compiled_graph, "convolutions_ms", lambda *_: least_ms)
        block = nn.Sequential(nn.Conv1d(16, 32, 3), nn.ReLU()).eval().to(torch.bfloat16)
        with torch.no_grad():
            compiled(block, compare=True)(torch.randn(2, 16, 7, dtype=torch.bfloat16))
        assert list(last().times_ms) == [others, "cudnn_autotune"]
        assert last().chosen == "cudnn_autotune"

    @pytest.mark.slow
    @pytest.mark.parametrize("dims", [1, 3])
    def test_a_graph_of_half_types_is_in_channels_last_without_a_word(
        self, dims: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inductor lays out 2-d graphs only. The caller gets the strides that PyTorch gives."""
        formats = formats_of_groups(monkeypatch)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        layers = (conv(16, 32, 3), nn.ReLU(), conv(32, 16, 3, padding=1), nn.ReLU())
        block = nn.Sequential(*layers).eval().to(torch.bfloat16)
        input = torch.randn(2, 16, *[7, 6, 5][:dims]).to(torch.bfloat16)
        with torch.no_grad():
            output = compiled(block)(input)
            expected = block.double()(input.double())
        assert_close(output, expected, 3 * TOLERANCES[torch.bfloat16])
        assert output.is_contiguous()
        assert formats == [torch.channels_last if dims == 1 else torch.channels_last_3d] * 2

    @pytest.mark.basic(3)
    @pytest.mark.parametrize(
        ("module", "favoured"),
        [
            (lambda: nn.Conv1d(32, 32, 3).half(), True),
            (lambda: nn.ConvTranspose1d(32, 32, 3).half(), True),
            (lambda: nn.Conv3d(32, 32, 3).half(), True),
            (lambda: nn.Conv1d(32, 32, 3), False),  # in float32
            (lambda: nn.Conv1d(32, 32, 3, groups=8).half(), False),
            (lambda: nn.Conv2d(32, 32, 3).half(), False),  # Inductor decides
            (lambda: nn.Conv2d(32, 32, 3, groups=2).half(), True),
            (lambda: nn.ConvTranspose2d(32, 32, 3, groups=2).half(), True),
            (lambda: nn.Conv2d(32, 32, 3, groups=2), False),  # in float32
            (lambda: nn.Conv2d(32, 32, 3, groups=32).half(), False),
        ],
    )
    def test_what_favours_channels_last(
        self, module: Callable[[], Any], favoured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found: list[bool] = []
        favours = layouts.favours_channels_last

        def asked(graph: Any) -> bool:
            found.append(favours(graph))
            return False

        monkeypatch.setattr(programs, "favours_channels_last", asked)
        model = module().eval()
        input = torch.randn(2, 32, *[8] * (model.weight.dim() - 2)).to(model.weight.dtype)
        with torch.no_grad():
            compiled(nn.Sequential(model, nn.ReLU()))(input)
        assert found == [favoured]

    @pytest.mark.parametrize("taps", [1, 3])
    def test_frames_convolved_one_by_one_leave_the_layout_to_volumes(
        self, taps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inductor lays out 2-d convolutions only. A decoder of videos has some for upsampling."""

        class Frames(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.volumes = nn.Conv3d(32, 32, taps, padding=taps // 2)
                self.images = nn.Conv2d(32, 32, 3, padding=1)

            def forward(self, x: Tensor) -> Tensor:
                frames = self.volumes(x).transpose(1, 2)
                return self.images(frames.flatten(0, 1)).relu()

        formats = formats_of_groups(monkeypatch)
        model, input = Frames().to(torch.bfloat16).eval(), torch.randn(1, 32, 3, 4, 5)
        with torch.no_grad():
            output = compiled(model)(input.to(torch.bfloat16))
            expected = model.double()(input.to(torch.bfloat16).double())
        assert_close(output, expected, 3 * TOLERANCES[torch.bfloat16])
        assert (torch.channels_last_3d in formats) == (taps == 3)

    def test_a_graph_that_cannot_be_laid_out_stays_as_it_is(self) -> None:
        class Viewed(nn.Sequential):
            def forward(self, x: Tensor) -> Any:
                y = super().forward(x)
                return y, y.view(-1)

        block = Viewed(nn.Conv1d(16, 16, 3), nn.ReLU()).eval().to(torch.bfloat16)
        input = torch.randn(2, 16, 9).to(torch.bfloat16)
        with torch.no_grad():
            output, flat = compiled(block)(input)
            expected = block(input)[0]
        assert_close(output, expected.double(), TOLERANCES[torch.bfloat16])
        assert flat.data_ptr() == output.data_ptr()
        assert last().mode == "inference"

    def into_input(model: Any, x: Tensor) -> Tensor:
        return model.conv(x.relu_())

    def into_state(model: Any, x: Tensor) -> Tensor:
        output = model.conv(x + model.state)
        model.state.copy_(x)
        return output

    def into_weight(model: Any, x: Tensor) -> Tensor:
        model.conv.weight[0].zero_()
        return model.conv(x)

    def into_computed_weight(model: Any, x: Tensor) -> Tensor:
        weight = 2 * model.conv.weight
        weight.clamp_(0, 0.1)
        return F.conv1d(x, weight, padding=1)

    def by_strides(model: Any, x: Tensor) -> Tensor:
        return model.conv(x).as_strided((16, 9), (1, 16)) + 1

    def by_an_operator(model: Any, x: Tensor) -> Tensor:
        return in_memory(model.conv(x)) + 1

    def into_reshaped(model: Any, x: Tensor) -> Tensor:
        y = model.conv(x)
        y.flatten(1).add_(1)  # a view where y is contiguous
        return y

    def into_reshaped_copy(model: Any, x: Tensor) -> Tensor:
        y = model.conv(x)
        y.transpose(1, 2).reshape(-1).zero_()  # a view where y is in channels_last
        return y + 1

    def into_copied_input(model: Any, x: Tensor) -> Tensor:
        y = x.contiguous(memory_format=torch.channels_last_3d)  # x itself, if it is laid out so
        y[:, 0].zero_()
        output: Tensor = model.conv(x) + y
        return output

    def into_copied_filters(model: Any, x: Tensor) -> Tensor:
        filters = model.conv.weight
        copied = filters.contiguous(memory_format=torch.channels_last)
        copied.zero_()
        images = x.flatten(0, 1)[None]
        output = F.conv2d(images, filters.repeat(2, 1, 1, 1), padding=1, groups=2)
        return output.view(x.shape) + copied.sum()

    CALLS = (
        *(into_state, into_weight, into_computed_weight, by_strides, by_an_operator),
        *(into_reshaped, into_reshaped_copy),
    )

    @pytest.mark.basic(2)
    @pytest.mark.parametrize(
        ("dims", "call"),
        [
            *((3, into_copied_input), (2, into_copied_filters), (3, into_input), (3, into_state)),
            *[(1, call) for call in CALLS],
        ],
    )
    def test_what_depends_on_memory_is_as_in_pytorch(
        self, dims: int, call: Callable[[Any, Tensor], Tensor]
    ) -> None:
        """A tensor that is written into, or read by its strides, is no copy in another layout."""

        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](16, 16, 3, padding=1)
        state = nn.Buffer(torch.randn(2, 16, *[9, 2, 3][:dims]))
        ours = Made(call, conv=conv, state=state).eval().to(torch.bfloat16)
        theirs = copy.deepcopy(ours)
        input = torch.randn(2, 16, *[9, 2, 3][:dims]).to(torch.bfloat16)
        inputs = input, input.clone()
        program = compiled(ours)
        with torch.no_grad():
            for _ in range(2):
                output, expected = program(inputs[0]), theirs(inputs[1])
                assert_close(output, expected.double(), TOLERANCES[torch.bfloat16])
        assert torch.equal(*inputs)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)

    def test_outputs_share_memory_only_where_pytorchs_do(self) -> None:
        class Twice(nn.Sequential):
            def forward(self, x: Tensor) -> Any:
                y = super().forward(x).transpose(1, 2)
                return y.reshape(2, -1), y.flatten(1)

        block = Twice(nn.Conv1d(16, 16, 3), nn.ReLU()).eval().to(torch.bfloat16)
        with torch.no_grad():
            first, second = compiled(block)(torch.randn(2, 16, 9).to(torch.bfloat16))
        assert first.data_ptr() != second.data_ptr()

    def test_outputs_are_of_the_class_of_pytorchs(self) -> None:
        """One of a class that wraps tensors is not copied into strides."""
        conv = nn.Conv1d(16, 16, 3, bias=False).to(torch.bfloat16)
        block = nn.Sequential(conv, nn.ReLU()).eval()
        parts = [torch.randn(2, 16, 9).to(torch.bfloat16) for _ in range(2)]
        with torch.no_grad():
            output = compiled(block)(TwoTensor(*parts))
            expected = [block(part) for part in parts]
        assert isinstance(output, TwoTensor)
        assert_close(output.a, expected[0].double(), TOLERANCES[torch.bfloat16])
        assert_close(output.b, expected[1].double(), TOLERANCES[torch.bfloat16])

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def test_sizes_that_depend_on_data(self) -> None:
        def forward(model: Any, x: Tensor) -> Tensor:
            chosen = model.conv(x).relu()[x[:, 0, 0].nonzero()[:, 0]]
            return F.interpolate(chosen, scale_factor=2)

        block = Made(forward, conv=nn.Conv1d(16, 16, 3)).eval().to(torch.bfloat16)
        x = torch.randn(3, 16, 9).to(torch.bfloat16)
        x[1] = 0
        with torch.no_grad():
            output = compiled(block)(x)
            expected = block.double()(x.double())
        assert output.shape == (2, 16, 14)
        assert_close(output, expected, TOLERANCES[torch.bfloat16])
        assert last().chosen == "cudnn_autotune", last().note

    def test_a_graph_that_is_not_laid_out_leaves_autocast_behind(self) -> None:
        """Neither what follows in the graph nor the caller computes in a half type."""

        def forward(model: Any, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = model.conv(x).view(len(x), -1)
            return y.float() @ y.float().T

        model = Made(forward, conv=nn.Conv1d(16, 16, 3)).eval()
        with torch.no_grad():
            output = compiled(model)(torch.randn(2, 16, 9))
        assert output.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("dims", [2, 3])
    def test_norms_and_upsampling_between_convolutions(
        self, dims: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are computed by other formulas, with PyTorch's results."""
        Conv, InstanceNorm = ((nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))[
            dims - 2
        ]
        layers = [Conv(16, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Upsample(scale_factor=2)]
        layers += [Conv(32, 16, 3), InstanceNorm(16, affine=True), nn.GELU(), Conv(16, 16, 1)]
        block = nn.Sequential(*layers).eval().to(torch.bfloat16)
        input = (3 + torch.randn(2, 16, *[18, 17, 16][:dims])).to(torch.bfloat16)
        used = []
        for name in ("group_norm", "instance_norm", "interpolate"):
            target = getattr(torch.nn.functional, name)
            formula = graph_copies.FORMULAS[target]

            def traced(*args: Any, formula: Any = formula, **kwargs: Any) -> Any:
                used.append(formula)
                return formula(*args, **kwargs)

            monkeypatch.setitem(graph_copies.FORMULAS, target, traced)
        with torch.no_grad():
            output = compiled(block)(input)
            expected = block.double()(input.double())
        assert set(used) == {formulas.group_norm, formulas.instance_norm, formulas.interpolate}
        assert_close(output, expected, 3 * TOLERANCES[torch.bfloat16])

    @pytest.mark.slow
    @pytest.mark.parametrize("dims", [1, 2])
    def test_convolutions_of_a_converted_model(
        self, dims: int, on_cpu: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are PyTorch's operators with a mark in the graph of Dynamo, and laid out like its
        functions."""
        formats = formats_of_groups(monkeypatch)
        self.win(monkeypatch, "contiguous")
        conv, up = (nn.Conv1d, nn.ConvTranspose1d) if dims == 1 else (nn.Conv2d, nn.ConvTranspose2d)
        block = nn.Sequential(conv(5, 8, 3), nn.ReLU(), up(8, 6, 2, 2), nn.ReLU(), conv(6, 4, 1))
        input = torch.randn(2, 5, *[11, 9][:dims])
        ca.convert(block.eval(), memory_format=torch.channels_last)
        model = compiled(block, **self.options("contiguous"))
        with torch.no_grad():
            expected = block(input)
            output, codes = run_and_get_code(model, input)
        torch.testing.assert_close(output, expected)
        assert output.stride() == expected.stride()
        assert formats == [torch.channels_last] * 2 + [torch.contiguous_format] * 2
        size = ", ".join(["2", *[r"\d+"] * (dims + 1)])  # none of a weight
        made = re.findall(rf"assert_\w+\(buf\d+, \({size}\), \((.*?)\)", codes[-1])
        assert [strides.split(", ")[-1] for strides in made] == ["1"] * 3

    @pytest.mark.slow
    @pytest.mark.parametrize("other", ["channels_last", "contiguous"])
    def test_a_computed_weight(self, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A convolution of it computes in the layout: here one group for each image, with weights
        that are modulated for it, as in StyleGAN2."""

        class Modulated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(1, 8, 4, 3, 3))
                self.up = nn.Parameter(torch.randn(8, 6, 3, 3))

            def forward(self, x: Tensor, style: Tensor) -> Tensor:
                n, c, h, w = x.shape
                weight = self.weight * style[:, None, :, None, None]
                weight = weight * weight.square().sum((2, 3, 4), keepdim=True).rsqrt()
                weight = weight.view(n * 8, 4, 3, 3)
                y = F.conv2d(x.reshape(1, n * c, h, w), weight, padding=1, groups=n)
                y = F.leaky_relu(y, 0.2)
                up = self.up.expand(n, *self.up.shape).flatten(0, 1)
                y = F.conv_transpose2d(y, up, stride=2, groups=n)
                return y.reshape(n, -1, *y.shape[2:])

        self.win(monkeypatch, other)
        block, x, style = Modulated().eval(), torch.randn(2, 4, 7, 5), torch.rand(2, 4) + 0.5
        if other == "contiguous":
            x = x.to(memory_format=torch.channels_last)
        model = compiled(block, **self.options(other))
        with torch.no_grad():
            output, codes = run_and_get_code(model, x, style)
            expected = block(x, style)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
            assert output.stride() == expected.stride()
        assert last().chosen == f"cudnn_autotune, {other}", last().note
        made = re.findall(r"assert_\w+\(buf\d+, \(1, \d+, \d+, \d+\), \((.*?)\)", codes[-1])
        innermost = 1 if other == "channels_last" else 3
        assert [text.split(", ")[innermost] for text in made] == ["1", "1"]


class TestCallers:
    def test_gradients_need_the_unfused_program(self, block: nn.Module, input: Tensor) -> None:
        ours, theirs = copy.deepcopy(block).train(), copy.deepcopy(block).train()
        compiled(ours)(input).sum().backward()
        theirs(input).sum().backward()
        assert last().mode == "training"
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3)

    def test_nothing_that_requires_a_gradient_is_inference(
        self, block: nn.Module, input: Tensor
    ) -> None:
        block.requires_grad_(False)
        output = compiled(block, freezing=True)(input)
        torch.testing.assert_close(output, block(input))
        assert (last().mode, last().is_frozen) == ("inference", True)
        assert not output.requires_grad

    @pytest.mark.slow
    def test_dynamic_sizes(self, block: Any, input: Tensor) -> None:
        options = {**FUSED, "freezing": True}
        model = torch.compile(block, backend="cudnn_autotune", options=options, dynamic=True)
        with torch.no_grad():
            for batch in (2, 5, 3):
                input = torch.randn(batch, 12, 9, 8)
                torch.testing.assert_close(model(input), block(input))
            (record,) = [one for one in ca.compilations() if one is last()]
            assert len(record.fused) == 3
            block.first.weight.mul_(2)
            torch.testing.assert_close(model(input), block(input))
        assert not record.is_frozen

    @pytest.mark.slow
    def test_a_converted_layer_keeps_its_policy(self, input: Tensor) -> None:
        """On the CPU it traces as PyTorch's; that it is taken at all is what is seen here."""
        model = nn.Sequential(ca.Conv2d(12, 12, 3, sampling="race"), nn.ReLU()).eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(input), model(input))
        assert len(last().fused) == 1

    def test_a_notebook_shows_the_records_as_a_table(self, block: Any, input: Tensor) -> None:
        with torch.no_grad():
            compiled(block)(input)
        found = ca.compilations()
        page = found._repr_html_()  # type: ignore[attr-defined]
        assert page.count("<tr>") == 1 + len(found)
        assert ">runs</th>" in page
        parts = f"{len(last().fused)} of {len(last().groups)} convolutions fused"
        assert f">{parts}</td>" in page.rpartition("<tr>")[2]

    def test_autocast(self, block: nn.Module, input: Tensor) -> None:
        model = compiled(block)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            output = model(input)
            assert output.dtype == torch.bfloat16
        with torch.no_grad():
            assert_close(output, block.double()(input.double()), 2 * TOLERANCES[torch.bfloat16])


class TestOptions:
    @pytest.mark.basic(4)
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"nonsense": 1}, "nonsense"),
            ({1: True}, r"options must be compare, .*, got 1"),
            ({"fuse": "perhaps"}, "'measure', 'always', 'never', got 'perhaps'"),
            ({"freezing": 1}, "freezing"),
            ({"compare": "yes"}, "compare"),
            (
                {"memory_format": "channels_last"},
                "must be one of None, 'auto', got 'channels_last'",
            ),
            ({"memory_format": torch.channels_last}, "must be one of None, 'auto', got torch"),
            ({"memory_format": "auto", "compare": False}, "compares programs in both layouts"),
            ({"sampling": "no mode"}, "sampling"),
            ({"workspace_limit": -5}, "workspace_limit"),
        ],
    )
    def test_a_wrong_one_is_named(
        self, options: dict[str, Any], text: str, block: nn.Module, input: Tensor
    ) -> None:
        with torch.no_grad(), pytest.raises(Exception, match=text) as raised:
            torch.compile(block, backend="cudnn_autotune", options=options)(input)
        assert "ValueError" in str(raised.value)


def test_the_name_is_known_in_a_process_that_imported_the_package() -> None:
    assert "cudnn_autotune" in torch._dynamo.list_backends()
    assert lookup_backend("cudnn_autotune").__module__ == "cudnn_autotune.compile.entry"


@pytest.mark.slow
def test_an_installed_package_needs_no_import(tmp_path: Path) -> None:
    """torch finds the backend by the entry point that pyproject.toml declares."""
    with (checkout.ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["torch_dynamo_backends"]
    folder = tmp_path / "installed-1.0.dist-info"
    folder.mkdir()
    lines = [f"{name} = {target}" for name, target in declared.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]))
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "assert 'cudnn_autotune' not in sys.modules\n"
        "print(lookup_backend('cudnn_autotune').__module__)"
    )
    assert evaluate(code).strip() == "cudnn_autotune.compile.entry"
