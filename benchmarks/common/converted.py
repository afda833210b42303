"""A model whose convolutions are this package's."""

from __future__ import annotations

from typing import Any


def convert(model: Any, sampling: str | None = None, layer: Any = None) -> int:
    """Puts a ``cudnn_autotune.Conv2d`` with the same parameters (not copies of them) in the place
    of every plain ``nn.Conv2d`` inside ``model``; returns of how many.

    Args:
        sampling: the layers' mode; None: that of the settings.
        layer: the class to put there; None: ``cudnn_autotune.Conv2d``.
    """
    from torch import nn

    import cudnn_autotune as ca

    twins: dict[nn.Conv2d, nn.Conv2d] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d:
                if child not in twins:
                    twins[child] = _twin(child, layer or ca.Conv2d, sampling)
                setattr(parent, name, twins[child])
    return len(twins)


def _twin(conv: Any, layer: Any, sampling: str | None) -> Any:
    # On "meta" it has no memory and no random values of its own.
    twin = layer(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,
        device="meta",
        sampling=sampling,
    )
    twin.weight, twin.bias = conv.weight, conv.bias
    return twin.train(conv.training)
