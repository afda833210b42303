"""What is remembered of norms in eager mode: new sizes, calls that the host decides, and what was
short. On a CPU that takes the way of an H100."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.served_on_cpu import served_on_cpu
from support.norms.served import is_ours, norms_on_cpu
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.norms import batch_norm_calls, group_norms
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms import memory as norm_memory
from cudnn_autotune.norms.plan import FORMS


@dataclass
class Times:
    """The milliseconds that programs seem to take."""

    gpu: dict[str, float] = field(default_factory=dict)
    call: dict[str, float] = field(default_factory=dict)
    """Those of a call with the host's part."""
    measured: int = 0
    """Number of times that programs of the GPU were timed."""
    forwards: list[str] = field(default_factory=list)
    """An entry for each forward that the operators have computed."""

    def __call__(self, programs: Mapping[str, Any], *_: Any, **options: Any) -> dict[str, float]:
        for program in programs.values():
            program()
        if options.get("with_host", True):
            return {name: norm_measuring.STEPS * self.call[name] for name in programs}
        self.measured += 1
        return {name: self.gpu.get(name, 9.0) for name in programs}


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Times]:
    found = Times({"pytorch": 3.0, "kept": 1.0})
    monkeypatch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
    monkeypatch.setattr(norm_measuring, "time_in_turns", found)
    monkeypatch.setattr(norm_memory, "_gpu_of", lambda input: gpu_of("h100"))
    library = torch.library.Library("cudnn_autotune", "IMPL")

    def group_norm(*arguments: Any) -> tuple[Tensor, Tensor]:
        found.forwards.append("group")
        return _group_norm(*arguments)

    library.impl("group_norm", group_norm, "CPU")
    ca.set_store(tmp_path / "store", mode="read_write")
    ca.forget()
    with norms_on_cpu() as found.forwards, served_on_cpu():
        yield found
    library._destroy()
    torch.ops.cudnn_autotune.group_norm.default._dispatch_cache.clear()
    ca.forget()


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    values = input.double().reshape(input.shape[0], groups, -1)
    var, mean = torch.var_mean(values, -1, correction=0)
    statistics = torch.stack([mean, (var + eps).rsqrt()]).float()
    wide = [None if one is None else one.double() for one in (weight, bias)]
    return F.group_norm(input.double(), groups, *wide, eps).to(input.dtype), statistics


def batch(n: int, side: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    x = torch.randn(n, 64, side, side, dtype=torch.half)
    return x.to(memory_format=layout)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance": lambda x: F.instance_norm(x[:1]),
    "group": lambda x: F.group_norm(x, 4),
}


FIRST = (64, 48, 32, 56)


def verdict_of(kind: str, x: Tensor) -> norm_memory.Verdict:
    """The verdict for a call under ``enable()``."""
    found: list[norm_memory.Verdict] = []
    verdict = norm_memory.NormMemory.verdict

    def seen(self: Any, call: Any, asker: Any) -> norm_memory.Verdict | None:
        one = verdict(self, call, asker)
        assert one is not None
        found.append(one)
        return one

    with pytest.MonkeyPatch.context() as patch, ca.enable():
        patch.setattr(norm_memory.NormMemory, "verdict", seen)
        CALLS[kind](x)
    return found[-1]


@pytest.mark.parametrize("kind", CALLS)
def test_a_size_of_another_class_is_pytorch_s(kind: str, times: Times) -> None:
    """Odd rows are read by numbers, other batches by other blocks."""
    count = 16 if kind == "instance" else 4
    sides = FIRST if kind != "instance" else range(16, 16 + 8 * count, 8)
    for side in sides:
        assert verdict_of(kind, batch(16, side)).choice.chosen == "kept"
    assert times.measured == count
    others = [(16, 63), (16, 57), (16, 512)]
    if kind != "instance":
        others += [(1, 255), (2, 181), (256, 15), (512, 8), (1, 256)]
    for n, side in others:
        if kind == "batch" and n == 1:
            continue  # a layer of its own
        verdict = verdict_of(kind, batch(n, side))
        assert verdict.choice.chosen == "pytorch", (n, side)
        assert verdict.most_calls >= 16
    near = verdict_of(kind, batch(16, 76))
    assert "its sizes change" in near.choice.note
    assert times.measured == count


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_size_that_is_computed_alike_is_served(layout: torch.memory_format, times: Times) -> None:
    for side in FIRST:
        verdict_of("batch", batch(16, side, layout))
    near = verdict_of("batch", batch(16, 60, layout))
    assert near.choice.chosen == "kept"
    assert "computed as" in near.choice.note
    assert near.most_calls >= 16
    # Where the gain was small, PyTorch's kernels serve until it is measured.
    ca.forget()
    times.gpu["kept"] = 2.9
    ca.set_store(mode="off")
    for side in FIRST:
        assert verdict_of("batch", batch(16, side, layout)).choice.chosen == "kept"
    assert verdict_of("batch", batch(16, 60, layout)).choice.chosen == "pytorch"


def test_a_size_that_stays_is_measured(times: Times) -> None:
    for side in FIRST:
        verdict_of("batch", batch(16, side))
    calls = verdict_of("batch", batch(16, 63)).most_calls
    assert calls == max(16, math.ceil(100 / (3.0 * (63 / 64) ** 2)))
    x = batch(16, 63)
    with ca.enable():
        for _ in range(calls - 1):
            CALLS["batch"](x)
        assert times.measured == 4
        CALLS["batch"](x)
        CALLS["batch"](x)
    assert times.measured == 5
    assert len(ca.norm_choices()) == 5


def test_modules_wait_each_for_itself(times: Times) -> None:
    """Many norms of one size in a model are not many calls of each."""
    model = ca.convert(nn.ModuleList([nn.BatchNorm2d(64) for _ in range(40)]))
    for side in FIRST:
        model[0](batch(16, side))
    x = batch(16, 61)
    for norm in model:
        assert not is_ours(norm(x))
    assert times.measured == 4
    while times.measured == 4:
        model[0](x)
    assert is_ours(model[0](x))


@pytest.mark.parametrize(
    ("gpu", "call", "is_served"),
    [
        (1.0, None, True),  # the GPU decides
        (0.1, 0.02, True),
        (0.1, 0.08, False),  # the host takes longer
        (0.1, 0.07, False),
    ],
)
@pytest.mark.parametrize("kind", [*CALLS, "module", "pair"])
def test_the_time_of_a_call_decides(
    kind: str, gpu: float, call: float | None, is_served: bool, times: Times
) -> None:
    times.gpu = {"pytorch": gpu, "kept": gpu / 2}
    times.call = {} if call is None else {"pytorch": 0.07, "kept": call}
    x = torch.randn(2, 64, 8, 8).requires_grad_()
    if kind in CALLS:
        with ca.enable():
            CALLS[kind](x)
    else:
        tail = [nn.ReLU()] if kind == "pair" else []
        ca.convert(nn.Sequential(nn.BatchNorm2d(64), *tail))(x)
    (choice,) = ca.norm_choices()
    assert choice.is_served == is_served
    assert choice.times_ms["pytorch"] == gpu
    assert dict(choice.call_times_ms) == pytest.approx(times.call)
    assert ("with the host" in str(choice)) == (call is not None)


@pytest.mark.parametrize("kind", [*CALLS, "module", "pair"])
def test_calls_are_timed_as_a_program_makes_them(
    kind: str, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way computes its own forwards, and nothing of the caller's changes."""
    times.gpu = {"pytorch": 0.2, "kept": 0.1}
    seen: dict[str, int] = {}

    def in_turns(programs: Mapping[str, Any], *args: Any, **options: Any) -> dict[str, float]:
        if options.get("with_host", True):
            for name, program in programs.items():
                before = len(times.forwards)
                program()
                seen[name] = len(times.forwards) - before
            return dict.fromkeys(programs, 1.0) | {"kept": 0.5}
        return {name: times.gpu.get(name, 9.0) for name in programs}

    monkeypatch.setattr(norm_measuring, "time_in_turns", in_turns)
    x = torch.randn(2, 64, 8, 8).requires_grad_()
    model = nn.Sequential(nn.BatchNorm2d(64), *([nn.ReLU()] if kind == "pair" else []))
    if kind in CALLS:
        with ca.enable():
            CALLS[kind](x)
    else:
        ca.convert(model)(x)
        assert model[0].num_batches_tracked == 1
    assert x.grad is None
    assert seen == {"pytorch": 0, "kept": norm_measuring.STEPS}
    (choice,) = ca.norm_choices()
    assert choice.is_served


def test_a_choice_by_an_earlier_rule_is_measured_again(
    times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = batch(16, 8)
    for kind in ("batch", "group"):
        with monkeypatch.context() as patch:
            patch.setattr(norm_measuring, "RULE", 1)
            verdict_of(kind, x)
        ca.forget()
        assert verdict_of(kind, x).choice.source == "tuned"
        ca.forget()
        assert verdict_of(kind, x).choice.source == "store"


@pytest.mark.parametrize("kind", CALLS)
def test_what_was_short_is_measured_again(
    kind: str, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    x = batch(16, 8)
    with monkeypatch.context() as patch, ca.enable():
        patch.setattr(batch_norm_calls, "measured_on", no_memory)
        patch.setattr(group_norms, "measured_on", no_memory)
        for _ in range(16 + 32):
            CALLS[kind](x)
        (choice,) = ca.norm_choices()
        assert (choice.chosen, choice.is_provisional) == ("pytorch", True)
        assert "memory" in choice.note
    with ca.enable():
        for _ in range(64):
            CALLS[kind](x)
    (choice,) = ca.norm_choices()
    assert (choice.chosen, choice.is_provisional) == ("kept", False)
    assert times.measured == 1


def test_a_misaligned_input_is_another_signature(times: Times) -> None:
    flat = torch.randn(1 + 16 * 64 * 64, dtype=torch.half)
    for x in (flat[1:].view(16, 64, 8, 8), flat[:-1].view(16, 64, 8, 8)):
        with ca.enable():
            CALLS["batch"](x)
            CALLS["group"](x)
    texts = [choice.signature for choice in ca.norm_choices()]
    assert len(texts) == 4
    assert sum("aligned=2" in text for text in texts) == 2


def test_a_constant_input_is_measured_at_its_alignment(times: Times) -> None:
    flat = torch.zeros(1 + 16 * 64, dtype=torch.half)
    given, *_ = norm_measuring.measured_on(flat[1:].view(1, 16, 8, 8), None, None)
    assert norm_measuring.alignment_of(given) == 2
    assert given.float().std() > 0.5


def test_an_entry_without_times_of_calls_is_read(times: Times) -> None:
    """They are there where the host may decide."""
    x = batch(16, 8)
    times.gpu, times.call = {"pytorch": 0.2, "kept": 0.1}, {"pytorch": 0.2, "kept": 0.1}
    first = verdict_of("batch", x).choice
    ca.forget()
    again = verdict_of("batch", x).choice
    assert again.source == "store"
    assert dict(again.call_times_ms) == dict(first.call_times_ms) != {}
