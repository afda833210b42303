"""Batch norms of this package in training among ranks, as they would be on a GPU; runs in each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cudnn_autotune as ca
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms.plan import FORMS
from support.conv.references import relative_error
from support.norms.models import conv, errors, train
from support.norms.served import norms_on_cpu


def trained(wrapping: str, fastest: list[str]) -> tuple[dict[str, float], list[list[str]]]:
    """How far steps of a converted model are from those of the plain one, and what computed its
    norms.

    Args:
        fastest: what seems the fastest on each rank.
    """
    torch.manual_seed(0)
    plain = _model()
    model = ca.convert(copy.deepcopy(plain))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(4, 8, 6, 5, generator=generator) for _ in range(3)]
    with _seems_on_gpu(fastest[dist.get_rank()]):
        steps = train(_wrapped(model, wrapping), inputs, of=model)
        chosen = [[choice.chosen for choice in norm_choices.choices_of(norm)] for norm in norms]
    expected = train(_wrapped(plain, wrapping), inputs, of=plain)
    for one in (steps, expected):
        one.state.update({name: _whole(value) for name, value in one.state.items()})
        one.gradients[:] = [_whole(value) for value in one.gradients]  # type: ignore[index]
    return errors(steps, expected), chosen


def synchronised() -> tuple[list[str], list[str], bool]:
    """The errors of a converted and of a plain model whose norms were made synchronised ones, which
    no CPU computes, and whether these are PyTorch's."""
    said = []
    models = [ca.convert(_model()), _model()]
    with _seems_on_gpu("kept"):
        for index, model in enumerate(models):
            models[index] = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            try:
                models[index](torch.randn(4, 8, 6, 5))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    kinds = [[type(module) for module in model.modules()] for model in models]
    is_pytorchs = all(nn.SyncBatchNorm in some for some in kinds)
    return said[:1], said[1:], is_pytorchs


def called_twice() -> tuple[float, float, bool]:
    """Two forwards before a backward, whose norms' buffers each forward broadcasts.

    Returns:
        The largest relative errors of this package's gradients and statistics from those in
        float64; whether its operators computed them.
    """
    torch.manual_seed(0)
    exact = _model()
    ours = ca.convert(copy.deepcopy(exact))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    inputs = [torch.randn(4, 8, 6, 5, generator=generator) for _ in range(2)]

    def gradients(model: nn.Module, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        wrapped = DistributedDataParallel(model.to(dtype), **options)
        outputs = [wrapped(x.to(dtype)) for x in inputs]
        sum(output.sin().sum() for output in outputs).backward()  # type: ignore[union-attr]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    # Statistics of a batch do not depend on running ones: only these are broadcast.
    expected = gradients(exact, torch.float64, broadcast_buffers=False)
    with _seems_on_gpu("kept"):
        found = gradients(ours, torch.float32)
        served = [m for m in ours.modules() if isinstance(m, nn.BatchNorm2d)]
        is_served = all(c.is_served for m in served for c in norm_choices.choices_of(m))
    worst = max(relative_error(*pair) for pair in zip(found, expected, strict=True))
    # Rank 0's statistics are everyone's at the beginning of the second forward.
    statistics = 0.0
    if dist.get_rank() == 0:
        pairs = [
            (one, other)
            for one, other in zip(ours.buffers(), exact.buffers(), strict=True)
            if one.is_floating_point()
        ]
        statistics = max(relative_error(*pair) for pair in pairs)
    return worst, statistics, is_served


@contextmanager
def _seems_on_gpu(fastest: str) -> Iterator[None]:
    def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        return {name: 1.0 + (name != fastest) for name in programs}

    with norms_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
        patch.setattr(norm_measuring, "time_in_turns", in_turns)
        yield


def _model() -> nn.Module:
    return nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.BatchNorm2d(8))


def _wrapped(model: nn.Module, wrapping: str) -> nn.Module:
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def _whole(value: Tensor) -> Tensor:
    full = getattr(value, "full_tensor", None)
    found: Tensor = value if full is None else full()
    return found
