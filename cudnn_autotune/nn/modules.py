"""``Conv2d``, a drop-in for ``torch.nn.Conv2d`` that runs the engine chosen for each shape."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.common_types import _size_2_t
from torch.types import Device

from cudnn_autotune.nn import functional
from cudnn_autotune.nn.functional import fast_conv2d, general_conv2d
from cudnn_autotune.tuning.settings import check_policy

_PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _WithPolicy(nn.Module):
    """Adds the two arguments that these modules take in addition to PyTorch's."""

    # The class has defaults too, for modules converted without __init__ (pickle, __class__).
    sampling: str | None = None
    workspace_limit: int | None = None

    def __init__(
        self,
        *args: Any,
        sampling: str | None = None,
        workspace_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_policy(sampling, workspace_limit)
        self.sampling = sampling
        self.workspace_limit = workspace_limit

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.sampling is not None:
            text += f", sampling={self.sampling}"
        if self.workspace_limit is not None:
            text += f", workspace_limit={self.workspace_limit}"
        return text


class Conv2d(_WithPolicy, nn.Conv2d):
    """``torch.nn.Conv2d`` that runs the cuDNN engine chosen for each shape by a search.

    It takes what ``torch.nn.Conv2d`` takes, has the same parameters and state dict, and is a
    subclass of it. On a device that is not CUDA it computes what ``torch.nn.Conv2d`` does, bit for
    bit.

    Args:
        sampling: how engines are chosen: one of ``cudnn_autotune.SAMPLING_MODES``, a registered
            mode, or None for ``cudnn_autotune.get_sampling()`` at the time of the call.
        workspace_limit: the most bytes of workspace that an engine may need, or None for
            ``cudnn_autotune.get_workspace_limit()``.

    Both are plain attributes and may be changed at any time.

    Raises:
        ValueError: the mode is unknown, or the limit negative; or as ``torch.nn.Conv2d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        stride: _size_2_t = 1,
        padding: str | _size_2_t = 0,
        dilation: _size_2_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: _PaddingMode = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        sampling: str | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
            sampling=sampling,
            workspace_limit=workspace_limit,
        )

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        if not torch.compiler.is_compiling():
            output = fast_conv2d(
                input,
                weight,
                bias,
                self.stride,
                padding,
                self.dilation,
                self.groups,
                self.sampling,
                self.workspace_limit,
            )
            if output is not NotImplemented:
                return output
        arguments = (input, weight, bias, self.stride, padding, self.dilation, self.groups)
        if isinstance(input, torch.fx.Proxy):  # the recorded graph calls the public function
            return functional.conv2d(
                *arguments, sampling=self.sampling, workspace_limit=self.workspace_limit
            )
        return general_conv2d(*arguments, self.sampling, self.workspace_limit)


class LazyConv2d(_WithPolicy, nn.LazyConv2d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConv2d`` that becomes a :class:`Conv2d` at its first call."""

    cls_to_become = Conv2d

    def __init__(
        self,
        out_channels: int,
        kernel_size: _size_2_t,
        stride: _size_2_t = 1,
        padding: _size_2_t = 0,
        dilation: _size_2_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: _PaddingMode = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        sampling: str | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        super().__init__(
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
            sampling=sampling,
            workspace_limit=workspace_limit,
        )
