"""A deep residual network, which amplifies rounding, and what it does wrong if it is told to."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

IMAGES = torch.randn(4, 16, 12, 12, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block of four convolutions. ``flaw`` is what it does wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.flaw = ""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            y = norm(conv(y)).relu()
        y = self.norms[-1](self.convs[-1](y))
        if self.flaw != "no residual":
            y = y + x
        return F.silu(y) if self.flaw == "another activation" else y.relu()


def deep_network(blocks: int) -> nn.Sequential:
    """A network with random weights, in eval mode; its batch norms know IMAGES' statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(blocks)], nn.BatchNorm2d(16))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the statistics are those of the next call
    with torch.no_grad():
        model(IMAGES)
    return model.eval()


def with_folded_norms(model: nn.Sequential) -> nn.Sequential:
    """A copy of the network with batch norms folded into the convolutions before them."""
    folded = copy.deepcopy(model)
    for block in folded:
        if isinstance(block, Block):
            pairs = zip(block.convs, block.norms, strict=True)
            convs = [fuse_conv_bn_eval(conv, norm) for conv, norm in pairs]
            block.convs = nn.ModuleList(convs)
            block.norms = nn.ModuleList(nn.Identity() for _ in convs)
    return folded


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over that of ``one``."""
    return float((one.double() - other.double()).norm() / one.double().norm())
