"""All kernel families, as the battery of tests sees them."""

from __future__ import annotations

from support.kernels import depthwise, few_channels, grouped, hopper
from support.kernels.battery import Family

FAMILIES: dict[str, Family] = {
    family.kernel.name: family
    for family in (
        depthwise.DEPTHWISE,
        depthwise.PLANES,
        depthwise.ONE_DIMENSION,
        depthwise.MMA,
        depthwise.WGRAD,
        depthwise.WGRAD_MMA,
        few_channels.FEW_CHANNELS,
        few_channels.PLANES,
        few_channels.WGRAD,
        grouped.GROUPED,
        grouped.WGRAD,
        hopper.FEW_FILTERS,
        hopper.IMPLICIT_GEMM_1D,
        hopper.WGRAD,
    )
} | {"depthwise_tile": depthwise.TILE, "narrow_wgrad": few_channels.NARROW_WGRAD}
"""The name of a kernel -> its problems. ``depthwise`` has tilings in shared memory, too, and
``few_channels_wgrad`` those for few filters."""
