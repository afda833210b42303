"""Convolutions in a model that time their own calls, and the model's training steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common.network import LOSS_SCALE
from torch import Tensor, nn

import cudnn_autotune as ca


class Watch:
    """Spans of the watched layers' calls, and the operands of one call of each."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.recording = False
        self.spans: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
        self.capturing = False
        self.operands: dict[str, dict[str, Tensor]] = {}
        """Layer -> ``x``, ``w``, ``g`` (of the output) of a call."""

    def mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """After a synchronisation."""
        if self.device == "cpu":
            return float(end - begin) * 1e3
        return float(begin.elapsed_time(end))

    def run(self, layer: str, op: str, call: Callable[[], Tensor]) -> Tensor:
        if not self.recording:
            return call()
        begin = self.mark()
        result = call()
        self.spans.setdefault((layer, op), []).append((begin, self.mark()))
        return result

    def take(self) -> dict[tuple[str, str], list[float]]:
        """Milliseconds of each call since the last time."""
        spans, self.spans = self.spans, {}
        return {key: [self.between_ms(*span) for span in row] for key, row in spans.items()}


class _Convolution(torch.autograd.Function):
    """The package's operators, one by one, as its own backward runs them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: Watched) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.layer = layer
        return layer.timed("fprop", x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        layer: Watched = ctx.layer
        g = g.contiguous(memory_format=torch.channels_last)
        if layer.watch.capturing:
            held = {"x": x.detach().clone(), "w": w.detach().clone(), "g": g.detach().clone()}
            layer.watch.operands.setdefault(layer.group, held)
        dx = layer.timed("dgrad", g, w, x.shape) if ctx.needs_input_grad[0] else None
        dw = layer.timed("wgrad", g, x, w.shape) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class Watched(ca.Conv2d):
    """A convolution of the package whose calls, forward and backward, are timed one by one."""

    watch: Watch
    group: str
    judged: tuple[str, ...] = ("fprop", "dgrad", "wgrad")
    """The operations that ``sampling`` is for; the others take the heuristics' first engine, so
    that nobody waits for choices that nobody looks at."""

    def op(self, op: str) -> Callable[..., Tensor]:
        ops = torch.ops.cudnn_autotune
        found = {"fprop": ops.conv_fprop, "dgrad": ops.conv_dgrad, "wgrad": ops.conv_wgrad}[op]
        tail = (list(self.stride), list(self.padding), list(self.dilation), self.groups)
        policy = ((self.sampling or "") if op in self.judged else "heuristic", -1)
        if op == "fprop":
            return lambda x, w: found(x, w, None, *tail, *policy)
        return lambda a, b, shape: found(a, b, list(shape), *tail, *policy)

    def timed(self, op: str, *operands: Any) -> Tensor:
        call = self.op(op)
        return self.watch.run(self.group, op, lambda: call(*operands))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Convolution.apply(input, weight, self)
        return out if bias is None else out + bias.view(1, -1, 1, 1)


def _alike(module: nn.Conv2d) -> tuple[Any, ...]:
    return (
        tuple(module.weight.shape),
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.bias is None,
    )


def watched(model: nn.Module, names: Sequence[str], watch: Watch) -> dict[str, list[Watched]]:
    """Turns the named layers, and those of the same configuration, into watched ones; by name.

    Raises:
        ValueError: no such layer, or one that is no plain Conv2d.
    """
    found: dict[str, list[Watched]] = {}
    modules = dict(model.named_modules())
    for name in names:
        first = modules.get(name)
        plain = isinstance(first, nn.Conv2d) and first.padding_mode == "zeros"
        if not plain or isinstance(first.padding, str):  # type: ignore[union-attr]
            raise ValueError(f"the model has no Conv2d {name!r} with padding of zeros")
        assert isinstance(first, nn.Conv2d)
        group = []
        # Layers after a common stem: those in the same stage see the same input.
        stage = name.split(".")[0]
        for other, module in modules.items():
            same = isinstance(module, nn.Conv2d) and other.split(".")[0] == stage
            if same and type(module) is nn.Conv2d and _alike(module) == _alike(first):
                module.__class__ = Watched
                assert isinstance(module, Watched)
                module.watch, module.group = watch, name
                group.append(module)
        if not group:
            raise ValueError(f"{name!r} is alike another named layer")
        found[name] = group
    return found


class Training:
    """Forward and backward of a model on one batch, again and again."""

    def __init__(
        self, model: nn.Module, shape: Sequence[int], device: str, dtype: torch.dtype, watch: Watch
    ) -> None:
        self.model = model
        self.watch = watch
        x = torch.randn(*shape, device=device).to(dtype)
        self.input = x.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (shape[0],), device=device)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.input).float(), self.labels)
        (loss * LOSS_SCALE).backward()

    def steps(self, count: int) -> tuple[float, float]:
        """(milliseconds a step, and those that the host took to enqueue one)."""
        self.synchronize()
        host = time.perf_counter()
        begin = self.watch.mark()
        for _ in range(count):
            self.step()
        end = self.watch.mark()
        host_ms = (time.perf_counter() - host) * 1e3
        self.synchronize()
        return self.watch.between_ms(begin, end) / count, host_ms / count

    def synchronize(self) -> None:
        if self.watch.device == "cuda":
            torch.cuda.synchronize()


def portrait(data: Tensor) -> dict[str, float | None]:
    """What of a tensor decides how much power it draws: its spread and its zeros."""
    values = data.float()
    std = float(values.std())
    zeros = float((values == 0).float().mean())
    return {"std": std if math.isfinite(std) else None, "zeros": zeros}
