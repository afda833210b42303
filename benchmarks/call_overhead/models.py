"""Small models that are bound by the host, as calls of PyTorch's and of our layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .columns import BY_KERNELS, ENABLE

Call = Callable[[], Any]


class Modulated(nn.Module):
    """A convolution whose filters differ from image to image, as in StyleGAN2: some twelve calls of
    functions, one of which is a convolution of a group for each image."""

    def __init__(self, channels: int, filters: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, filters, channels, kernel, kernel))
        self.style = nn.Linear(16, channels)
        self.padding = kernel // 2

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        filters, kernel = self.weight.shape[1], self.weight.shape[-1]
        weight = self.weight * self.style(z).view(n, 1, channels, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum([2, 3, 4], keepdim=True) + 1e-8)
        weight = weight.view(n * filters, channels, kernel, kernel)
        y = F.conv2d(x.reshape(1, n * channels, height, width), weight, None, 1, self.padding, 1, n)
        return F.leaky_relu(y.view(n, filters, y.shape[2], y.shape[3]), 0.2)


class TwoModulated(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.first = Modulated(channels, channels, kernel)
        self.second = Modulated(channels, channels, kernel)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.second(self.first(x, z), z)


def block(channels: int, kernel: int) -> nn.Module:
    def convolution() -> nn.Module:
        return nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    return nn.Sequential(convolution(), nn.ReLU(), convolution(), nn.ReLU(), convolution())


def norm(channels: int, kernel: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels))


def norm_act(channels: int, kernel: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


def functions_call(model: nn.Module, x: Tensor) -> Call:
    """A forward that calls functions, without gradients."""
    z = torch.randn(len(x), 16, device=x.device, dtype=x.dtype)
    return lambda: model(x, z)


def per_sample_call(model: nn.Module, x: Tensor) -> Call:
    """The gradient of the weights for each image, by ``vmap`` of ``grad``."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, values, (image.unsqueeze(0),))
        return output.float().square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    images = x.expand(8, -1, -1, -1).contiguous() if len(x) == 1 else x
    return lambda: gradients(parameters, images)


def checkpoint_call(model: nn.Module, x: Tensor) -> Call:
    """Forward and backward of a block that is computed twice."""
    from torch.utils.checkpoint import checkpoint

    leaf = x.detach().requires_grad_()
    inputs = (leaf, *model.parameters())
    grad_output = torch.randn_like(model(x).detach())

    def call() -> Any:
        output = checkpoint(model, leaf, use_reentrant=False)
        return torch.autograd.grad(output, inputs, grad_output)

    return call


def forward_call(model: nn.Module, x: Tensor) -> Call:
    """A forward in training that autograd records."""
    leaf = x.detach().requires_grad_()
    return lambda: model(leaf)


def train_call(model: nn.Module, x: Tensor) -> Call:
    """Forward and backward in training."""
    leaf = x.detach().requires_grad_()
    inputs = (leaf, *model.parameters())
    grad_output = torch.randn_like(x)
    return lambda: torch.autograd.grad(model(leaf), inputs, grad_output)


SETTINGS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[Any, Tensor], Call]]] = {
    "functions": (TwoModulated, functions_call),
    "per_sample": (block, per_sample_call),
    "checkpoint": (block, checkpoint_call),
    "norm_forward": (norm, forward_call),
    "norm": (norm, train_call),
    "norm_act": (norm_act, train_call),
}


def calls_of(setting: str, request: dict[str, Any], x: Tensor, layout: Any) -> dict[str, Call]:
    """The calls of a setting: PyTorch's twice (an A/A pair), and those of the converted model."""
    import cudnn_autotune as ca

    build, call_of = SETTINGS[setting]
    model = build(request["shape"][1], request["kernel"])
    model = model.to(request["device"])
    if not setting.startswith("norm"):  # weights and statistics of norms stay in float32
        model = model.to(getattr(torch, request["dtype"]))
    if setting != "functions":  # it has filters of five dimensions
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
    calls = {
        "pytorch": call_of(copy.deepcopy(model), x),
        "pytorch, again": call_of(copy.deepcopy(model), x),
        "ours": call_of(ca.convert(copy.deepcopy(model), norms=True), x),
    }
    if setting.startswith("norm"):
        calls[ENABLE] = call_of(copy.deepcopy(model), x)
        calls[BY_KERNELS] = call_of(_by_kernels(copy.deepcopy(model), x), x)
    return calls


def _by_kernels(model: nn.Module, x: Tensor) -> nn.Module:
    """A model of :func:`norm` or :func:`norm_act`, converted, whose norm our kernels compute."""
    import cudnn_autotune as ca
    from cudnn_autotune.core.extension import _C
    from cudnn_autotune.norms.choices import choose_function

    converted = ca.convert(model, norms=True)
    _C.set_norm_chooser(lambda *given: (True, 0))
    try:
        converted(x.detach().requires_grad_())
    finally:
        _C.set_norm_chooser(choose_function)
    return converted
