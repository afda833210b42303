"""``torch.nn.SyncBatchNorm`` whose forward does not wait for the GPU.

PyTorch's takes ranks with an empty batch out of what all ranks have gathered. Their number is known
on the GPU alone, so the host waits for it in each forward, and the GPU then waits for the host.
Here such a rank counts as next to no values, which leaves the result to the others.

All else is PyTorch's: the kernels, the collectives and what they carry. Unless a batch is empty,
results have the same bits, and ranks need not agree on which of the two forwards computes a call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules._functions import SyncBatchNorm as _OfPyTorch

from cudnn_autotune.nn.modules import Unscriptable
from cudnn_autotune.norms.batch_norms import traced, with_signature_of
from cudnn_autotune.norms.reference import statistics_dtype, values_a_channel

_DEVICE = "cuda"
"""The type of devices whose norms this forward computes."""
_NO_VALUES = 1e-30
"""The count of an empty batch. PyTorch's kernel divides by the sum of counts, which must not be 0,
and counts further in whole numbers, in which this is none."""


class SyncBatchNorm(Unscriptable, nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` whose forward does not wait for the GPU."""

    @with_signature_of(nn.SyncBatchNorm.forward)
    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (group := self._group(input)) is not None:
            mean = var = None
            if self.track_running_stats:
                mean, var = self.running_mean, self.running_var
                assert self.num_batches_tracked is not None  # else there is no group
                self.num_batches_tracked.add_(1)
            tensors = (input, self.weight, self.bias, mean, var)
            ranks = dist.get_world_size(group)
            output: Tensor = _Function.apply(*tensors, self.eps, self.momentum, group, ranks)
            return output
        if isinstance(input, Proxy):
            return traced(self, input)
        return super().forward(input)

    def _group(self, input: Any) -> Any:
        """Returns the ranks that exchange the statistics of a call; None if PyTorch's forward
        computes it."""
        if (
            type(input) is not Tensor
            or input.device.type != _DEVICE
            or input.dim() < 2
            or input.shape[1] == 0
            or not self.training
            or self.momentum is None
            or not (dist.is_available() and dist.is_initialized())
        ):
            return None
        if self.track_running_stats and not (
            _is_statistic(self.running_mean)
            and _is_statistic(self.running_var)
            and self.num_batches_tracked is not None
        ):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def _get_name(self) -> str:
        return f"{__name__}.{super()._get_name()}"


def _is_statistic(running: Tensor | None) -> bool:
    """Returns whether a running statistic has a dtype that counts of values have, too."""
    return running is not None and running.dtype in (torch.float32, torch.float64)


class _Function(_OfPyTorch):
    """PyTorch's function of these norms, with a forward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: Any,
        ranks: int,
    ) -> Tensor:
        in_rows = (torch.channels_last, torch.channels_last_3d)
        if not any(input.is_contiguous(memory_format=one) for one in in_rows):
            input = input.contiguous()
        weight = None if weight is None else weight.contiguous()
        channels, count = input.shape[1], values_a_channel(input)
        if count:
            mean, inv_std = torch.batch_norm_stats(input, eps)
        else:
            mean = input.new_zeros(channels, dtype=statistics_dtype(input.dtype))
            inv_std = torch.ones_like(mean)
        own = torch.cat([mean, inv_std, mean.new_full((1,), count or _NO_VALUES)])
        of_all = own.new_empty(ranks, len(own))
        _gather(of_all, own, group)
        means, inv_stds, counts = of_all.split([channels, channels, 1], dim=1)
        mean, inv_std = torch.batch_norm_gather_stats_with_counts(
            mean if running_mean is None else input,  # its dtype is that of the counts
            means,
            inv_stds,
            running_mean,
            running_var,
            momentum,
            eps,
            counts.squeeze(1).to((mean if running_mean is None else running_mean).dtype),
        )
        # PyTorch's backward reads these.
        ctx.save_for_backward(input, weight, mean, inv_std, counts.to(torch.int32))
        ctx.process_group = group
        ctx.sums = None if count else mean.new_zeros(2 * channels)
        if not count:
            return torch.empty_like(input)
        return torch.batch_norm_elemt(input, weight, bias, mean, inv_std, eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if ctx.sums is None:
            return _OfPyTorch.backward(ctx, grad_output)
        if ctx.needs_input_grad[0]:  # the other ranks wait for it
            dist.all_reduce(torch.zeros_like(ctx.sums), group=ctx.process_group)
        return (None,) * 9


def _gather(of_all: Tensor, own: Tensor, group: Any) -> None:
    """Fills the rows of a tensor with the vectors of all ranks."""
    if dist.get_backend(group) == "gloo":
        dist.all_gather(list(of_all.unbind()), own, group)
        return
    # The function has another name since PyTorch 2.14.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(of_all.view(-1), own, group)
