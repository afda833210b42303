"""Networks that segment images."""

from __future__ import annotations

from torchvision.models import segmentation

from layer_lists.network import Network, Wanted

NETWORKS = (
    Network(
        "DeepLabV3 ResNet-50",
        "torchvision",
        lambda: segmentation.deeplabv3_resnet50(weights_backbone=None),
        (3, 520, 520),
        (
            Wanted("deeplabv3_layer4_dilation4", "backbone.layer4.1.conv2", 8),
            Wanted("deeplabv3_aspp_12", "classifier.0.convs.1.0", 4),
            Wanted("deeplabv3_aspp_24", "classifier.0.convs.2.0", 4, True),
            Wanted("deeplabv3_aspp_36", "classifier.0.convs.3.0", 4),
            Wanted("deeplabv3_aspp_project", "classifier.0.project.0", 8),
        ),
    ),
)
