"""Norms whose sizes keep changing: a step of PyTorch's module, forward and backward, as it is and
while ``enable()`` is in force. Each way's step is captured in a CUDA graph, and the graphs take
turns: the host's part does not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import numbers
from common.modes import synchronize
from models.turns import calibrate, take_turns

from .measure import WAYS, Call, served

OPS = ("batch_norm", "group_norm", "instance_norm")
# Steps of a graph. An unmeasured size is measured after 16 calls at the earliest.
_STEPS = 8
_BLOCK_MS, _ROUNDS, _MORE = 1.0, 12, 3
_WARM_UP_S = 0.02


@dataclass(frozen=True)
class Norm:
    """A norm in training."""

    op: str
    dtype: str
    channels_last: bool
    input_shape: tuple[int, ...]

    @property
    def bytes(self) -> float:
        """Bytes of input, output and their gradients together."""
        return 4.0 * math.prod(self.input_shape) * (4 if self.dtype == "float32" else 2)

    @property
    def is_defined(self) -> bool:
        """Whether a channel of an image has enough values for any norm."""
        return math.prod(self.input_shape[2:]) >= 4


def layers(op: str, is_dry: bool) -> dict[str, Norm]:
    """Norms by name, whose channels fill whole vectors or do not."""
    found = {}
    for channels in (8,) if is_dry else (64, 100):
        for dtype in ("float32",) if is_dry else ("float16", "float32"):
            for last in (False, True) if op == "batch_norm" else (False,):
                shape = (2, channels, 6, 6) if is_dry else (16, channels, 48, 40)
                name = f"{op} {channels} {dtype} {'last' if last else 'first'}"
                found[name] = Norm(op, dtype, last, shape)
    return found


def step_of(norm: Norm, device: str) -> Call:
    """A forward and a backward of the module, on random data."""
    import torch
    from torch import nn

    channels = norm.input_shape[1]
    make: Callable[[], Any] = {
        "batch_norm": lambda: nn.BatchNorm2d(channels),
        "group_norm": lambda: nn.GroupNorm(4, channels),
        "instance_norm": lambda: nn.InstanceNorm2d(channels, affine=True),
    }[norm.op]
    dtype = getattr(torch, norm.dtype)
    module = make().to(device=device)
    if norm.op == "group_norm":
        module = module.to(dtype)
    x = torch.randn(norm.input_shape, device=device).to(dtype)
    if norm.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    grad_output = torch.randn_like(x)
    inputs = (x.requires_grad_(), *module.parameters())
    return lambda: torch.autograd.grad(module(x), inputs, grad_output)


def _replay(step: Call, way: str, device: str) -> Call:
    """Some steps of a way in a CUDA graph; on a CPU they are called."""
    import torch

    def steps() -> None:
        for _ in range(_STEPS):
            step()

    if device == "cpu":

        def call() -> None:
            with served(way):
                steps()

        return call
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with served(way):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            steps()
    return graph.replay


def measure(norm: Norm, device: str, worse_than: float) -> dict[str, Any]:
    """Measures both ways; returns PyTorch's microseconds a step, and PyTorch's time over ours. What
    is below ``worse_than`` is measured once more with more rounds, and only that counts."""
    step = step_of(norm, device)
    for way in WAYS:
        with served(way):
            step()
    synchronize(device)
    replays = {way: _replay(step, way, device) for way in WAYS}
    counts = calibrate(replays, _BLOCK_MS, _WARM_UP_S, device)
    for rounds in (_ROUNDS, _MORE * _ROUNDS):
        times = take_turns(replays, counts, rounds, device)
        ratios = [a / b for a, b in zip(times["pytorch"], times["auto"], strict=True)]
        if numbers.median(ratios) >= worse_than:
            break
    return {
        "PyTorch (us)": 1e3 * numbers.median(times["pytorch"]) / _STEPS,
        "PyTorch over auto": numbers.median(ratios),
    }


def served_by(known: int) -> str:
    """Returns the kind of service of the last new size: a key of ``kinds`` of ``changing.row``.

    Args:
        known: number of choices before it came.
    """
    import cudnn_autotune as ca
    from cudnn_autotune.norms.choices import _memory

    if len(ca.norm_choices()) > known:
        return "searched"
    put_off = list(_memory._put_off.values())
    return "neighbour" if put_off and put_off[-1].verdict.choice.is_served else "own path"
