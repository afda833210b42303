"""Networks over videos."""

from __future__ import annotations

from torchvision.models import video

from layer_lists.network import Network, Wanted

NETWORKS = (
    Network(
        "R(2+1)D-18",
        "torchvision",
        video.r2plus1d_18,
        (3, 16, 112, 112),
        (
            Wanted("r2plus1d_layer1_spatial", "layer1.0.conv1.0.0", 16, True),
            Wanted("r2plus1d_layer2_temporal_stride2", "layer2.0.conv1.0.3", 16),
        ),
    ),
    Network(
        "R3D-18",
        "torchvision",
        video.r3d_18,
        (3, 16, 112, 112),
        (Wanted("r3d_layer1_3x3x3", "layer1.0.conv1.0", 16),),
    ),
)
