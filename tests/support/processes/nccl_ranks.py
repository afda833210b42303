"""What ranks with a GPU each do; the functions run in each of them (``gloo_ranks.Ranks``)."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cudnn_autotune as ca
from support.norms import synchronised as norms
from support.norms.models import conv, errors, train

PREPARED = {
    "convert": lambda model: ca.convert(model),
    "compile": lambda model: torch.compile(model, backend="cudnn_autotune"),
    "enable": lambda model: model,
}


def _group() -> Any:
    """A group of all ranks that communicates between GPUs; each rank has a GPU of its own."""
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


def _model() -> nn.Module:
    return nn.Sequential(
        *(conv(16, 32), nn.BatchNorm2d(32), nn.ReLU()),
        *(conv(32, 32), nn.BatchNorm2d(32), nn.ReLU()),
    )


def synchronised(how: str) -> tuple[dict[str, float], dict[str, float]]:
    """The errors from float64 of steps with synchronised norms: of a prepared model, and of
    PyTorch's own."""
    group = _group()
    torch.manual_seed(0)
    model = _model().cuda().to(memory_format=torch.channels_last)
    plain, theirs, exact = (
        nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model), group) for _ in range(3)
    )
    exact.double()
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(4 + dist.get_rank(), 16, 14, 14, generator=generator) for _ in range(3)]
    inputs = [one.cuda().contiguous(memory_format=torch.channels_last) for one in inputs]
    expected = train(exact, [one.double() for one in inputs])
    if how == "enable":
        with ca.enable():
            mine = train(plain, inputs)
    else:
        mine = train(PREPARED[how](plain), inputs, of=plain)
    found = errors(mine, expected), errors(train(theirs, inputs), expected)
    dist.destroy_process_group(group)
    return found


def synchronised_norms(
    cases: list[tuple[Any, ...]],
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The errors of a norm in each case, and its differences from PyTorch's."""
    group = _group()
    found = [norms.trained_on_gpu(*case, group) for case in cases]
    dist.destroy_process_group(group)
    return found


def tuned_where_one_dies(culprit: int) -> list[str]:
    """Tunes a model with the other ranks, of whom one is killed during its second problem."""
    torch.cuda.set_device(dist.get_rank())
    model = ca.convert(_model().cuda().half())
    seen: list[str] = []

    def told(choice: ca.Choice) -> None:
        seen.append(choice.text)
        if dist.get_rank() == culprit:
            os.kill(os.getpid(), signal.SIGKILL)

    with ca.on_decision(told):
        ca.distributed.tune(model, torch.randn(4, 16, 14, 14, device="cuda").half(), timeout_s=30)
        time.sleep(0.1)
    return seen
