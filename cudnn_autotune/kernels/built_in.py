"""The package's implementations, in the order of their offers."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.kernels.depthwise.depthwise import Depthwise
from cudnn_autotune.kernels.depthwise.depthwise_1d import Depthwise1d
from cudnn_autotune.kernels.depthwise.depthwise_mma import DepthwiseMma
from cudnn_autotune.kernels.depthwise.depthwise_planes import DepthwisePlanes
from cudnn_autotune.kernels.depthwise.depthwise_wgrad import DepthwiseWgrad
from cudnn_autotune.kernels.depthwise.depthwise_wgrad_mma import DepthwiseWgradMma
from cudnn_autotune.kernels.few_channels.few_channels import FewChannels
from cudnn_autotune.kernels.few_channels.few_channels_planes import FewChannelsPlanes
from cudnn_autotune.kernels.few_channels.few_channels_wgrad import FewChannelsWgrad
from cudnn_autotune.kernels.grouped.grouped import Grouped
from cudnn_autotune.kernels.grouped.grouped_wgrad import GroupedWgrad
from cudnn_autotune.kernels.hopper.few_filters import FewFilters
from cudnn_autotune.kernels.hopper.implicit_gemm_1d import ImplicitGemm1d
from cudnn_autotune.kernels.hopper.implicit_gemm_1d_wgrad import ImplicitGemm1dWgrad
from cudnn_autotune.kernels.rewrites.adjoint import Adjoint
from cudnn_autotune.kernels.rewrites.channels_last import ChannelsLast
from cudnn_autotune.kernels.rewrites.fft import Fft
from cudnn_autotune.kernels.rewrites.filter_depths import FilterDepths
from cudnn_autotune.kernels.rewrites.pad_channels import PadChannels
from cudnn_autotune.kernels.rewrites.patches import Patches
from cudnn_autotune.kernels.rewrites.sliced_pointwise import SlicedPointwise
from cudnn_autotune.kernels.rewrites.space_to_depth import SpaceToDepth

BUILT_IN: tuple[Implementation, ...] = (
    Depthwise(),
    Depthwise1d(),
    DepthwiseMma(),
    DepthwisePlanes(),
    DepthwiseWgrad(),
    DepthwiseWgradMma(),
    FewChannels(),
    FewChannelsPlanes(),
    FewChannelsWgrad(),
    FewFilters(),
    Grouped(),
    GroupedWgrad(),
    ImplicitGemm1d(),
    ImplicitGemm1dWgrad(),
    ChannelsLast(),
    FilterDepths(),
    PadChannels(),
    Patches(),
    SlicedPointwise(),
    SpaceToDepth(),
    Adjoint(),
    Fft(),
)


def built_in() -> Sequence[Implementation]:
    return BUILT_IN
