"""Batch norms with what follows them: operands, and what PyTorch makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
EPS = 1e-3


@dataclass(frozen=True)
class Norm:
    """Operands of ``batch_norm_act``, and the gradients of its output."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    grad_output: Tensor
    grad_output_2: Tensor | None
    activation: str

    def to(self, dtype: torch.dtype) -> Norm:
        """The same norm in one dtype, on the CPU, in contiguous memory."""
        tensors = {
            name: value.detach().to("cpu", dtype, memory_format=torch.contiguous_format)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @property
    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, str, float]:
        """The arguments of ``batch_norm_act``."""
        return self.input, self.weight, self.bias, self.residual, self.activation, EPS


@dataclass(frozen=True)
class Results:
    """The results of a norm, forward and backward; None where nothing asks for one."""

    output: Tensor
    mean: Tensor
    inv_std: Tensor
    unbiased_var: Tensor
    grad_input: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_residual: Tensor | None


def norm(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    activation: str = "relu",
    residual: bool = False,
    second: bool = False,
    affine: bool = True,
    parameters: torch.dtype | None = None,
    channels_last: bool = False,
    device: str = "cpu",
    offset: float = 1.0,
    seed: int = 0,
) -> Norm:
    """Random operands: the input's mean is about ``offset``, its deviation about 2."""
    generator = torch.Generator().manual_seed(seed)

    def random(of: tuple[int, ...], wanted: torch.dtype = dtype) -> Tensor:
        values = torch.randn(of, generator=generator).to(device, wanted)
        if channels_last and len(of) in CHANNELS_LAST:
            return values.contiguous(memory_format=CHANNELS_LAST[len(of)])
        return values

    channels = shape[1:2]
    parameters = parameters or (torch.float64 if dtype is torch.float64 else torch.float32)
    return Norm(
        random(shape) * 2 + offset,
        random(channels, parameters) if affine else None,
        random(channels, parameters) if affine else None,
        random(shape) if residual else None,
        random(shape),
        random(shape) if second else None,
        activation,
    )


def by_pytorch(given: Norm) -> Results:
    """The results of ``F.batch_norm``, ``+`` and the activation, by PyTorch's autograd."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in vars(given).items()
        if isinstance(value, Tensor) and not name.startswith("grad_output")
    }
    input = leaves["input"]
    z = F.batch_norm(
        input, None, None, leaves.get("weight"), leaves.get("bias"), training=True, eps=EPS
    )
    if "residual" in leaves:
        z = z + leaves["residual"]
    output = NORM_ACTIVATIONS[given.activation].forward(z)
    grad = given.grad_output
    if given.grad_output_2 is not None:
        grad = grad + given.grad_output_2
    output.backward(grad)
    dims = [0, *range(2, input.dim())]
    wide = input.detach().to(torch.promote_types(input.dtype, torch.float32))
    var, mean = torch.var_mean(wide, dims, correction=0)
    unbiased = torch.var(wide, dims, correction=1)
    assert input.grad is not None
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return Results(
        output.detach(),
        mean,
        torch.rsqrt(var + EPS),
        unbiased,
        input.grad,
        gradients.get("weight"),
        gradients.get("bias"),
        gradients.get("residual"),
    )


def by_operators(given: Norm) -> Results:
    """The results of the two operators; a second gradient is given to the backward directly."""
    ops = torch.ops.cudnn_autotune
    output, mean, inv_std, unbiased, mask = ops.batch_norm_act(*given.operands)
    by_output = given.residual is not None and NORM_ACTIVATIONS[given.activation].by_output
    affine = given.weight is not None
    gradients = ops.batch_norm_act_backward(
        given.grad_output,
        given.grad_output_2,
        given.input,
        (mask if mask.numel() else output) if by_output else None,
        given.weight,
        given.bias,
        given.residual,
        mean,
        inv_std,
        given.activation,
        [True, affine, affine, given.residual is not None],
    )
    return Results(output, mean, inv_std, unbiased, *gradients)
