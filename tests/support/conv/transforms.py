"""Transforms of a convolution, by name: functions of an input and a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor


def _tangent(input: Tensor, weight: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = F.conv2d(forward_ad.make_dual(input, input.cos()), weight)
        return forward_ad.unpack_dual(dual).tangent


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda x, w: torch.func.grad(lambda w: F.conv2d(x, w).sin().sum())(w),
    "jvp": lambda x, w: torch.func.jvp(lambda w: F.conv2d(x, w), (w,), (w.cos(),))[1],
    "vjp": lambda x, w: torch.func.vjp(lambda w: F.conv2d(x, w), w)[1](F.conv2d(x, w))[0],
    "vmap": lambda x, w: torch.vmap(lambda x: F.conv2d(x, w))(x.expand(3, *x.shape)),
    "vmap_of_grad": lambda x, w: torch.vmap(
        torch.func.grad(lambda w, x: F.conv2d(x, w).sin().sum()), (None, 0)
    )(w, x[:, None]),
    "hessian": lambda x, w: torch.func.hessian(lambda w: F.conv2d(x, w).sin().sum())(w),
    "dual": _tangent,
}
