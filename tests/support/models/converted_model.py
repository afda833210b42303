"""Models that are converted before or after they are wrapped for several ranks; runs in each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cudnn_autotune as ca
from support.models.spread_model import steps_outputs


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


def trained(wrapping: str, when: str) -> tuple[list[float], list[float], int, bool]:
    """Outputs of training steps of the plain model and of the converted one, how many modules are
    served, and whether `revert` restores every class."""
    plain = steps_outputs(_wrapped(_model(), wrapping))
    model = _model()
    if when == "before":
        model = _wrapped(ca.convert(model), wrapping)
    else:
        model = _wrapped(model, wrapping)
    kinds = [type(module) for module in model.modules()]
    if when == "after":
        ca.convert(model)
    outputs = steps_outputs(model)
    served = len(ca.conversion(model).served)
    ca.revert(model)
    steps_outputs(model)  # it can be trained on
    if when == "after":
        return plain, outputs, served, [type(module) for module in model.modules()] == kinds
    return plain, outputs, served, not ca.conversion(model).served


def refusals(wrapping: str) -> list[str]:
    """What is said where a layout is wanted of a wrapped model, and whether it was changed."""
    model = _wrapped(_model(), wrapping)
    kinds = [type(module) for module in model.modules()]
    said = []
    for given in ("auto", torch.channels_last):
        example = torch.randn(2, 3, 12, 12) if given == "auto" else None
        try:
            ca.convert(model, memory_format=given, example_input=example)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
        assert [type(module) for module in model.modules()] == kinds
    return said


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Standardized(4, 4, 3), nn.Conv2d(4, 4, 3))


def _wrapped(model: nn.Module, wrapping: str) -> nn.Module:
    layers: Any = model
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    if wrapping == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in (layers[0], layers[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    cpu = torch.device("cpu")
    layers[2] = FullyShardedDataParallel(layers[2], use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
