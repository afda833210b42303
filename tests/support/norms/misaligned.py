"""Norms of tensors whose addresses are no multiple of a vector's size, on a GPU; a program of its
own, because what reads beside an address ends the process.

Arguments: ``enable``, ``convert`` or ``checkpoint``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MEMORY = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(1, 8, 33, 2), (16, 64, 28, 28), (7, 24, 51), (64, 96), (2, 16, 4, 6, 10)]


def moved(tensor: Tensor, place: int) -> Tensor:
    """The same values and strides, some elements behind the beginning of new memory."""
    memory = tensor.new_empty(tensor.numel() + place)
    return memory.as_strided(tensor.shape, tensor.stride(), place).copy_(tensor)


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def gradients(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = call(x)
    return [output.detach(), *torch.autograd.grad(output, x, grad)]


def main(way: str) -> None:
    torch.manual_seed(0)
    count = 0
    if way != "convert":
        ca.enable()
    for shape, dtype, last in itertools.product(SHAPES, TOLERANCES, (False, True)):
        x = torch.randn(shape, device="cuda").to(dtype)
        if last:
            if x.dim() not in MEMORY:
                continue
            x = x.contiguous(memory_format=MEMORY[x.dim()])
        grad = torch.randn_like(x)
        norm = getattr(nn, f"BatchNorm{max(1, x.dim() - 2)}d")(shape[1]).cuda()
        wide = gradients(batch_norm, x.double(), grad.double())
        model = ca.convert(nn.Sequential(norm)) if way == "convert" else nn.Sequential(norm)
        calls: dict[str, Callable[[Tensor], Tensor]] = {"batch": model}
        if way == "checkpoint":
            calls = {"batch": lambda x, m=model: checkpoint(m, x, use_reentrant=False)}  # type: ignore[misc]
        if x.dim() > 2:
            calls["group"] = lambda x: F.group_norm(x, 2)
        for (name, call), (at, grad_at) in itertools.product(
            calls.items(), [(1, 0), (0, 1), (1, 3), (2, 2), (4, 0), (3, 7)]
        ):
            expected = wide
            if name == "group":
                expected = gradients(lambda x: F.group_norm(x, 2), x.double(), grad.double())
            found = gradients(call, moved(x, at), moved(grad, grad_at))
            torch.cuda.synchronize()
            for one, other in zip(found, expected, strict=True):
                error = float((one.double() - other).norm() / other.norm())
                assert error <= TOLERANCES[dtype], (name, shape, dtype, last, at, grad_at, error)
            count += 1
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
