"""Models whose gradients or parameters are spread over ranks; runs in each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_autotune.nn.untouched import run_once

_BACKWARD = torch.ops.aten.convolution_backward.default


class Backwards(TorchDispatchMode):
    """Which gradients each convolution's backward was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _BACKWARD:
            self.masks.append(tuple(args[-1]))
        return func(*args, **(kwargs or {}))


def trained(wrapping: str) -> tuple[list[tuple[bool, ...]], list[float], list[float]]:
    """What ``run_once`` asks for; outputs of training steps without it, and after it."""
    plain = steps_outputs(_model(wrapping))
    model = _model(wrapping)
    with Backwards() as backwards:
        run_once(model, (torch.randn(2, 3, 12, 12),), {})
    return backwards.masks, plain, steps_outputs(model)


def _model(wrapping: str) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), inner, nn.Conv2d(4, 4, 3))
    if wrapping == "ddp inside":
        return nn.Sequential(nn.Identity(), DistributedDataParallel(model, static_graph=True))
    if wrapping == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], inner, model[3]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    cpu = torch.device("cpu")
    for place in (0, 2, 3):
        model[place] = FullyShardedDataParallel(model[place], use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)


def steps_outputs(model: nn.Module) -> list[float]:
    """Three steps, on other data on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outputs = []
    for step in range(3):
        torch.manual_seed(10 * dist.get_rank() + step)
        optimizer.zero_grad()
        y = model(torch.randn(2, 3, 12, 12))
        (y**2).mean().backward()
        optimizer.step()
        outputs.append(y.detach().norm().item())
    return outputs
