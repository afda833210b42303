"""PyTorch's batch norms, as drop-ins that train by this package's operators.

``convert(model, norms=True)`` gives them to a model. Whatever the operators do not do is left to
PyTorch's class: evaluation, ``momentum=None``, float64, transforms, tensor subclasses, tracing, and
a device that is not CUDA. A compiler traces PyTorch's function.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)

_batch_norm_act = torch.ops.cudnn_autotune.batch_norm_act


class ServedNorm(_BatchNorm):
    """The forward of BatchNorm1d to BatchNorm3d."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):  # a tracer takes PyTorch's class for one call
            tracer: Any = input.tracer
            traced: Any = tracer.create_proxy(
                "call_module", tracer.path_of_module(self), (input,), {}
            )
            return cast("Tensor", traced)
        if torch.compiler.is_compiling() or not _is_served(self, input):
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance = self.running_mean, self.running_var
        is_tracking = self.training and self.track_running_stats
        if is_tracking and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        found = _batch_norm_act(input, self.weight, self.bias, None, "identity", self.eps)
        if is_tracking and mean is not None and variance is not None:
            assert self.momentum is not None
            new = [found[1], found[3]]
            torch._foreach_lerp_([mean, variance], new, self.momentum)
        output: Tensor = found[0]
        return output

    def _get_name(self) -> str:
        return f"cudnn_autotune.{super()._get_name()}"


class BatchNorm1d(ServedNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that trains by this package's operators on a GPU."""


class BatchNorm2d(ServedNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that trains by this package's operators on a GPU."""


class BatchNorm3d(ServedNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that trains by this package's operators on a GPU."""


def _is_served(norm: _BatchNorm, input: Tensor) -> bool:
    """Returns whether the operators compute what the module does with an input."""
    mean, variance = norm.running_mean, norm.running_var
    if not _is_plain(input) or input.dim() < 2 or norm.eps <= 0:
        return False
    if not (norm.training or (mean is None and variance is None)):
        return False
    if norm.training and norm.track_running_stats:
        if norm.momentum is None or mean is None or variance is None:
            return False
        for one in (mean, variance):
            if not _is_plain(one) or one.dtype != torch.float32 or len(one) != input.shape[1]:
                return False
    return (
        _is_on_gpu(input)
        and input.dtype in _DTYPES
        and input.numel() > 0
        and all(one is None or _is_plain(one) for one in (norm.weight, norm.bias))
        and all(
            one is None or one.dtype in (input.dtype, torch.float32)
            for one in (norm.weight, norm.bias)
        )
        and not _is_watched()
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_watched() -> bool:
    """Returns whether a transform, a mode or a tracer stands between a call and its operators."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch.autograd.forward_ad._current_level >= 0
    )
