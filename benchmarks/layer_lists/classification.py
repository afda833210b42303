"""Networks that classify images."""

from __future__ import annotations

import torchvision

from layer_lists.network import FIRST, Network, Wanted

NETWORKS = (
    Network(
        "ResNet-50",
        "torchvision",
        torchvision.models.resnet50,
        (3, 224, 224),
        (
            Wanted("resnet50_conv1", "conv1", 64, True, FIRST),
            Wanted("resnet50_layer1_1x1", "layer1.0.conv3", 64),
            Wanted("resnet50_layer1_3x3", "layer1.1.conv2", 64, True),
            Wanted("resnet50_layer2_3x3_stride2", "layer2.0.conv2", 64),
            Wanted("resnet50_layer2_down", "layer2.0.downsample.0", 64, True),
            Wanted("resnet50_layer3_3x3", "layer3.1.conv2", 128, True),
            Wanted("resnet50_layer3_3x3_batch1", "layer3.1.conv2", 1),
            Wanted("resnet50_layer4_1x1", "layer4.1.conv1", 64, True),
            Wanted("resnet50_layer4_3x3", "layer4.1.conv2", 64),
        ),
    ),
    Network(
        "VGG-16",
        "torchvision",
        torchvision.models.vgg16,
        (3, 224, 224),
        (
            Wanted("vgg16_conv3_2", "features.12", 64),
            Wanted("vgg16_conv4_2", "features.19", 128, True),
        ),
    ),
    Network(
        "ResNeXt-50 32x4d",
        "torchvision",
        torchvision.models.resnext50_32x4d,
        (3, 224, 224),
        (
            Wanted("resnext50_layer1_group", "layer1.1.conv2", 32, True),
            Wanted("resnext50_layer2_group_stride2", "layer2.0.conv2", 32),
            Wanted("resnext50_layer4_group", "layer4.1.conv2", 32),
        ),
    ),
    Network(
        "Inception v3",
        "torchvision",
        lambda: torchvision.models.inception_v3(init_weights=False),
        (3, 299, 299),
        (
            Wanted("inceptionv3_5x5", "Mixed_5b.branch5x5_2.conv", 64),
            Wanted("inceptionv3_1x7", "Mixed_6e.branch7x7_2.conv", 64),
        ),
    ),
    Network(
        "EfficientNetV2-S",
        "torchvision",
        torchvision.models.efficientnet_v2_s,
        (3, 300, 300),
        (
            Wanted("efficientnetv2_s_stem", "features.0.0", 32, False, FIRST),
            Wanted("efficientnetv2_s_stage2_fused", "features.2.1.block.0.0", 32, True),
            Wanted("efficientnetv2_s_stage2_project", "features.2.1.block.1.0", 32),
            Wanted("efficientnetv2_s_stage4_depthwise_stride2", "features.4.0.block.1.0", 32),
            Wanted("efficientnetv2_s_stage5_depthwise", "features.5.1.block.1.0", 32, True),
            Wanted("efficientnetv2_s_stage6_expand", "features.6.1.block.0.0", 32),
        ),
    ),
    Network(
        "ConvNeXt-T",
        "torchvision",
        torchvision.models.convnext_tiny,
        (3, 224, 224),
        (
            Wanted("convnext_t_stem", "features.0.0", 32, False, FIRST),
            Wanted("convnext_t_stage1_depthwise", "features.1.0.block.0", 32, True),
            Wanted("convnext_t_stage3_depthwise", "features.5.0.block.0", 32),
            Wanted("convnext_t_down3", "features.6.1", 32, True),
        ),
    ),
    Network(
        "ConvNeXt-B",
        "torchvision",
        torchvision.models.convnext_base,
        (3, 224, 224),
        (
            Wanted("convnext_b_stage2_depthwise_batch8", "features.3.0.block.0", 8),
            Wanted("convnext_b_down1_batch8", "features.2.1", 8),
        ),
    ),
    Network(
        "MobileNetV3-Large",
        "torchvision",
        torchvision.models.mobilenet_v3_large,
        (3, 224, 224),
        (
            Wanted("mobilenetv3_stem", "features.0.0", 128, False, FIRST),
            Wanted("mobilenetv3_block2_depthwise_stride2", "features.2.block.1.0", 128),
            Wanted("mobilenetv3_block5_depthwise_5x5", "features.5.block.1.0", 128, True),
            Wanted("mobilenetv3_block13_depthwise_5x5_stride2", "features.13.block.1.0", 128),
            Wanted("mobilenetv3_block12_expand", "features.12.block.0.0", 128, True),
            Wanted("mobilenetv3_block12_squeeze", "features.12.block.2.fc1", 128),
        ),
    ),
)
