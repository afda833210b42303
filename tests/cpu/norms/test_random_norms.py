"""Random norms under ``enable`` and of converted models, on a CPU that takes the way of a GPU:
values, strides, dtypes, versions and second derivatives are those of PyTorch's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.conv.references import relative_error
from support.conv.served_on_cpu import served_on_cpu
from support.norms.served import norms_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms.plan import FORMS

WAYS = ["plain", "double", "checkpoint", "reentrant", "no gradients", "frozen", "in place", "twice"]
MEMORY = {4: torch.channels_last, 5: torch.channels_last_3d}
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    norm: nn.Module
    x: Tensor
    way: str
    converts: bool

    @staticmethod
    def random(seed: int) -> Case:
        r = random.Random(seed)
        torch.manual_seed(seed)
        dims, dtype = r.choice([0, 1, 2, 2, 2, 3]), r.choice(list(TOLERANCES))
        kind = r.choice(["batch", "batch", "batch", "instance", "group"]) if dims else "batch"
        channels = r.choice([1, 3, 8, 32, 100])
        shape = (r.choice([1, 2, 7, 32]), channels, *(r.choice([1, 2, 5, 9]) for _ in range(dims)))
        affine, tracks = r.random() < 0.8, r.random() < 0.6
        options: dict[str, Any] = {"affine": affine}
        norm: nn.Module
        if kind == "group":
            groups = r.choice([g for g in (1, 2, 4, channels) if channels % g == 0])
            norm = nn.GroupNorm(groups, channels, **options)
        else:
            name = {"batch": "BatchNorm", "instance": "InstanceNorm"}[kind]
            options |= {"track_running_stats": tracks, "momentum": r.choice([0.1, 1.0, 0.5])}
            norm = getattr(nn, f"{name}{max(dims, 1)}d")(channels, **options)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 0.7, 0.3)
        if kind == "group" or (r.random() < 0.3 and not tracks):
            norm = norm.to(dtype)
        if affine and r.random() < 0.2:
            norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        scale, mean = r.choice([1, 1, 0.01, 30]), r.choice([0, 0, 3, 300])
        x = _laid_out((torch.randn(shape) * scale + mean).to(dtype), r)
        way, converts = r.choice(WAYS), kind == "batch" and r.random() < 0.5
        if way == "double" and any(p.dtype is not torch.float32 for p in norm.parameters()):
            converts = False  # PyTorch's second derivatives for a CPU want statistics of this dtype
        return Case(norm, x, way, converts)


def _laid_out(x: Tensor, r: random.Random) -> Tensor:
    layout = r.choice(["plain", "channels_last", "slice", "odd address", "permuted"])
    if layout == "channels_last" and x.dim() in MEMORY:
        return x.contiguous(memory_format=MEMORY[x.dim()])
    if layout == "slice":
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "odd address":
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if layout == "permuted":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def results(case: Case, norm: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, gradients, second derivatives and buffers."""
    way = case.way
    given = x.detach().requires_grad_(way not in ("frozen", "no gradients"))
    if way == "no gradients":
        with torch.no_grad():
            return [norm(given), *norm.buffers()]
    if way in ("checkpoint", "reentrant"):
        output = checkpoint(norm, given, use_reentrant=way == "reentrant")
    else:
        output = norm(norm(given)) if way == "twice" else norm(given)
    if way == "in place":
        output = torch.sigmoid_(output)
    wanted = [t for t in (given, *norm.parameters()) if t.requires_grad]
    if not wanted:
        return [output.detach(), *norm.buffers()]
    weights = torch.linspace(-1, 2, output.numel()).cos().view(output.shape).to(output.dtype)
    if way == "reentrant":
        output.backward(weights)
        gradients = [t.grad for t in wanted if t.grad is not None]
        return [output.detach(), *gradients, *norm.buffers()]
    gradients = [*torch.autograd.grad(output, wanted, weights, create_graph=way == "double")]
    if way == "double":
        loss = sum((g.float() ** 2).sum() for g in gradients)
        second = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
        gradients += [g for g in second if g is not None]
    return [output.detach(), *(g.detach() for g in gradients), *norm.buffers()]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        return {name: 1.0 + (name != "kept") for name in programs}

    monkeypatch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
    monkeypatch.setattr(norm_measuring, "time_in_turns", in_turns)
    ca.forget()
    with norms_on_cpu() as found, served_on_cpu():
        yield found
    ca.forget()


def outcome(call: Callable[[], list[Tensor]]) -> list[Tensor] | Exception:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return error


@pytest.mark.parametrize("mode", ["sample_once", "heuristic"])
@pytest.mark.parametrize("part", range(8))
def test_norms(part: int, mode: str, served: list[str]) -> None:
    for seed in range(40 * part, 40 * (part + 1)):
        case = Case.random(seed)
        theirs, ours, wide = (copy.deepcopy(case.norm) for _ in range(3))
        expected = outcome(lambda case=case, norm=theirs: results(case, norm, case.x))  # type: ignore[misc]
        if case.converts:
            ours = ca.convert(nn.ModuleList([ours]), sampling=mode)[0]  # type: ignore[index]
        with nullcontext() if case.converts else ca.enable(mode):
            found = outcome(lambda case=case, norm=ours: results(case, norm, case.x))  # type: ignore[misc]
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected)), (seed, case)
            continue
        assert not isinstance(found, Exception), (seed, case, found)
        exact = results(case, wide.double(), case.x.double())
        tolerance = TOLERANCES[case.x.dtype]
        for place, (one, other, right) in enumerate(zip(found, expected, exact, strict=True)):
            where = (seed, place, case)
            assert one.dtype == other.dtype, where
            assert one.stride() == other.stride(), where
            if not one.is_floating_point():
                assert torch.equal(one, other), where
                continue
            if float(right.norm()) <= 1e-3 * right.numel() ** 0.5:
                continue  # numbers that cancel
            own = relative_error(other, right)
            if place and case.way in ("double", "twice") and own > 0.05:
                continue
            assert relative_error(one, right) <= max(tolerance, 4 * own), where
        for buffer, other_buffer in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert buffer._version == other_buffer._version, (seed, case)
    assert served
