"""PyTorch's group and instance norms, as drop-ins that keep the layout channels_last.

``convert(model, memory_format=...)`` gives them to a model. PyTorch's functions bring an input in
channels_last into contiguous memory, and return a contiguous output. These modules return an output
in channels_last of any dimension, (N, *spatial, C) in memory. This package's kernels compute it and
its gradients in that order, if they are the fastest (``choices``); else PyTorch's functions do,
and the output is copied. Those always compute float64, running statistics, and calls with hooks on
saved tensors. Inputs in another layout, transforms, modes and tracers are left to PyTorch's class,
with its strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from cudnn_autotune.core.extension import _C
from cudnn_autotune.functional import enter_policy, leave_policy
from cudnn_autotune.nn.modules import Unscriptable
from cudnn_autotune.norms.batch_norms import traced
from cudnn_autotune.norms.group_norms import in_rows


class KeptLayout(Unscriptable):
    """The forward of these modules."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return self._by_pytorch(input)
        if isinstance(input, Proxy):
            return traced(self, input)
        found = self._computed(input)
        if isinstance(found, Tensor):
            return found
        enter_policy(getattr(self, "sampling", None), None)
        try:
            output = self._by_pytorch(input)
        finally:
            leave_policy()
        return output if found is None else in_rows(output)

    def _by_pytorch(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output

    def _computed(self, input: Any) -> Any:
        """Returns the output by this package's kernels; NotImplemented if PyTorch's function
        computes an input in channels_last, None if it computes another one."""
        raise NotImplementedError

    def _get_name(self) -> str:
        return f"cudnn_autotune.{super()._get_name()}"


class GroupNorm(KeptLayout, nn.GroupNorm):
    """``torch.nn.GroupNorm`` whose output is in channels_last if its input is."""

    def _computed(self, input: Any) -> Any:
        tensors = (input, self.weight, self.bias)
        return _C.group_norm(self, *tensors, self.num_groups, self.eps, True)


class KeptInstanceNorm(KeptLayout):
    """The forward of InstanceNorm1d to InstanceNorm3d."""

    def _computed(self, input: Any) -> Any:
        of: Any = self
        if input.dim() != of._get_no_batch_dim() + 1 or input.shape[1] != of.num_features:
            return None
        # The kernels have no running statistics: no groups stand for a norm that they do not take.
        groups = of.num_features if of.running_mean is None else 0
        return _C.group_norm(self, input, of.weight, of.bias, groups, of.eps, False)


class InstanceNorm1d(KeptInstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` whose output is in channels_last if its input is."""


class InstanceNorm2d(KeptInstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` whose output is in channels_last if its input is."""


class InstanceNorm3d(KeptInstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` whose output is in channels_last if its input is."""
