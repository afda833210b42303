"""Small models with batch norms in their usual places, and training steps of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.conv.references import relative_error


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)


class NormAct(nn.BatchNorm2d):
    """A user's class that holds a norm and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.act(super().forward(input))
        return result


class Residual(nn.Module):
    """ResNet's block: the addition and the activations write in place."""

    def __init__(self, channels: int = 8, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.norm = conv(channels, channels), nn.BatchNorm2d(channels)
        self.second, self.norm2 = conv(channels, channels), nn.BatchNorm2d(channels)
        self.activation = activation(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        y = self.norm2(self.second(y))
        y += x
        return self.activation(y)


class Projected(nn.Module):
    """The shortcut has a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = conv(8, 12), nn.BatchNorm2d(12)
        self.shortcut, self.norm2 = conv(8, 12, 1), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(x)) + self.norm2(self.shortcut(x)))


class IntoShortcut(Projected):
    """The addition writes into the shortcut's norm, which nothing else reads."""

    def forward(self, x: Tensor) -> Tensor:
        identity = self.norm2(self.shortcut(x))
        identity += self.norm(self.first(x))
        return identity.relu_()


class SqueezeExcite(nn.Module):
    """EfficientNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = conv(8, 16, 1), nn.BatchNorm2d(16)
        self.depthwise, self.norm2 = conv(16, 16, groups=16), nn.BatchNorm2d(16)
        self.reduce, self.restore = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project, self.norm3 = conv(16, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.expand(x)), inplace=True)
        y = F.silu(self.norm2(self.depthwise(y)), inplace=True)
        scale = self.restore(F.silu(self.reduce(y.mean((2, 3), keepdim=True)))).sigmoid()
        return self.norm3(self.project(y * scale)) + x


class Dense(nn.Module):
    """DenseNet's layer: the norm is before the convolution, and reads what is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = conv(8, 4), nn.BatchNorm2d(12)
        self.second, self.norm2 = conv(12, 4), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, self.first(x)], 1)
        y = torch.cat([y, self.second(F.relu(self.norm(y), inplace=True))], 1)
        return F.relu(self.norm2(y))


class Activated(nn.Module):
    """A convolution, a norm and an activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.conv, self.norm = conv(8, 8), nn.BatchNorm2d(8, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class SmallResNet(nn.Module):
    """ResNet-18's kinds of layers, two stages of them, and a loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.norm = conv(3, width, 5, stride=2), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(width), Residual(width))
        self.down, self.norm2 = conv(width, 2 * width, stride=2), nn.BatchNorm2d(2 * width)
        self.shortcut, self.norm3 = conv(width, 2 * width, 1, stride=2), nn.BatchNorm2d(2 * width)
        self.last = Residual(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(F.relu(self.norm(self.stem(x)), inplace=True))
        y = self.blocks(y)
        y = F.relu(self.norm2(self.down(y)) + self.norm3(self.shortcut(y)))
        logits = self.head(self.last(y).mean((2, 3)))
        labels = torch.arange(x.shape[0], device=x.device) % 10
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


@dataclass(frozen=True)
class Steps:
    """The results of some training steps."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]
    """Gradients of the inputs, and of the parameters at the end."""
    state: dict[str, Tensor]
    """Parameters and buffers at the end."""


def data(*shape: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 2 + 0.5 for _ in range(count)]


def train(model: Any, inputs: Sequence[Tensor], *, of: nn.Module | None = None) -> Steps:
    """Takes a step of SGD with each input, so small that no gradient becomes a difference of sums.

    Args:
        model: what is called.
        of: the module that has the parameters, if that is another one.
    """
    module = of or model
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    outputs, gradients = [], []
    for given in inputs:
        given = given.detach().requires_grad_()
        optimizer.zero_grad()
        output = model(given)
        output.double().sin().sum().backward()
        optimizer.step()
        outputs.append(output.detach().clone())
        gradients.append(given.grad.clone())
    left = [parameter.grad for parameter in module.parameters()]
    gradients += [gradient.clone() for gradient in left if gradient is not None]
    return Steps(outputs, gradients, copy.deepcopy(module.state_dict()))


def errors(actual: Steps, expected: Steps) -> dict[str, float]:
    """The largest relative error of each kind. What counts steps has to be the same."""
    for name, value in expected.state.items():
        if not value.dtype.is_floating_point:
            assert torch.equal(actual.state[name].cpu(), value.cpu()), name
    pairs = {
        "outputs": list(zip(actual.outputs, expected.outputs, strict=True)),
        "gradients": list(zip(actual.gradients, expected.gradients, strict=True)),
        "state": [
            (actual.state[name], value)
            for name, value in expected.state.items()
            if value.dtype.is_floating_point
        ],
    }
    return {kind: max(relative_error(*pair) for pair in some) for kind, some in pairs.items()}


def check_steps(
    model: nn.Module,
    inputs: Sequence[Tensor],
    prepare: Callable[[nn.Module], Any],
    autocast: bool = False,
    factor: float = 3,
) -> None:
    """Trains what ``prepare`` makes of a model, and holds it to PyTorch's errors from float64.

    Args:
        model: has the parameters, also those of what ``prepare`` returns.
        inputs: one for each step.
        prepare: returns what is called in the place of the model.
        autocast: whether forwards, but those in float64, run under autocast to bfloat16.
        factor: what errors may be over PyTorch's, without autocast.
    """
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    wide = [given.detach().double() for given in inputs]

    def forward(call: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                output: Tensor = call(x)
            return output

        return run

    steps = train(forward(prepare(model)), inputs, of=model)
    expected = train(copy.deepcopy(exact), wide)
    ours = errors(steps, expected)
    eager = errors(train(forward(theirs), inputs, of=theirs), expected)
    factor, least = (1.5, 0.0) if autocast else (factor, 2e-6)
    if any(error > factor * eager[kind] + least for kind, error in ours.items()):
        # A value beside the kink of an activation may be rounded to its other side.
        rounded = 2**-8 if autocast else 2**-20
        for _ in range(16):
            shaken = [x * (1 + rounded * torch.randn_like(x)) for x in wide]
            found = errors(train(copy.deepcopy(exact), shaken), expected)
            eager = {kind: max(error, found[kind]) for kind, error in eager.items()}
    for kind, error in ours.items():
        assert error <= factor * eager[kind] + least, (kind, ours, eager)


def overall_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The relative error of all tensors together."""
    one, other = (
        torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
        for tensors in (actual, expected)
    )
    return relative_error(one, other)


def penalties(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of a model, its gradients, and those of their squares."""
    input = x.clone().requires_grad_()
    wanted = (input, *model.parameters())
    output = model(input)
    first = torch.autograd.grad(output.sin().sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    return [output.detach(), *(gradient.detach() for gradient in (*first, *second))]
