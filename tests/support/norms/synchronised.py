"""Norms that ranks synchronise, against a norm of the joined batch in float64; runs in each rank.

``on_cpu`` gives a CPU the functions that PyTorch has on a GPU alone, by the formulas of its
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cudnn_autotune.norms import synchronised
from support.conv.references import relative_error

CHANNELS = 6
_STEPS = 2


def steps(norm: Any, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    """The results of training steps of a norm; gradients are those of the steps in sum."""
    found: dict[str, Tensor] = {}
    for index, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        given = x.detach().requires_grad_()
        output = norm(given)
        output.backward(gradient)
        found[f"output {index}"] = output.detach()
        assert given.grad is not None or given.numel() == 0
        found[f"input's gradient {index}"] = given if given.grad is None else given.grad
    for name, parameter in norm.named_parameters():
        if parameter.grad is not None:
            found[f"{name}'s gradient"] = parameter.grad
    return found | dict(norm.named_buffers())


def drawn(
    sizes: Sequence[int], dtype: torch.dtype, in_rows: bool, device: Any = "cpu"
) -> list[list[Tensor]]:
    """An input and an output's gradient for each step of all ranks, whose batches differ in size,
    mean and deviation."""
    generator = torch.Generator().manual_seed(7)
    laid = torch.channels_last if in_rows else torch.contiguous_format

    def of_rank(rank: int, batch: int) -> Tensor:
        x = torch.randn(batch, CHANNELS, 5, 3, generator=generator) * (1 + rank) + 4 * rank - 3
        return x.to(device, dtype).contiguous(memory_format=laid)

    return [[of_rank(*one) for one in enumerate(sizes)] for _ in range(2 * _STEPS)]


def new_norm(cls: type[Any], like: nn.Module | None = None, **options: Any) -> Any:
    """A norm with random parameters, or with those of another one."""
    norm = cls(CHANNELS, **options)
    if like is not None:
        norm.load_state_dict(like.state_dict())
        return norm
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


def errors(found: dict[str, Tensor], norm: Any, tensors: list[list[Tensor]]) -> dict[str, float]:
    """The relative errors of this rank's results.

    Args:
        norm: a norm of one process, with the parameters that all ranks began with, in float64.
        tensors: those of :func:`drawn`.
    """
    rank = dist.get_rank()
    joined = [torch.cat(one).double() for one in tensors]
    expected = steps(norm, joined[:_STEPS], joined[_STEPS:])
    begin = sum(len(one) for one in tensors[0][:rank])
    own = slice(begin, begin + len(tensors[0][rank]))
    for name, wanted in expected.items():
        if name.startswith(("output", "input")):
            expected[name] = wanted[own]
        elif "gradient" in name:  # ranks have parts of a sum; one without values may have none
            part = found.get(name, torch.zeros_like(wanted)).to("cpu", torch.float64)
            dist.all_reduce(part)
            found = {**found, name: part}
    assert expected.keys() == found.keys()
    return {name: relative_error(found[name], wanted) for name, wanted in expected.items()}


def trained_on_cpu(sizes: list[int], in_rows: bool, options: dict[str, Any]) -> dict[str, float]:
    """The errors of this package's norm in float32."""
    torch.manual_seed(0)
    tensors = drawn(sizes, torch.float32, in_rows)
    exact = new_norm(nn.BatchNorm2d, **options)
    norm = new_norm(synchronised.SyncBatchNorm, exact, **options)
    mine = [one[dist.get_rank()] for one in tensors]
    with on_cpu():
        found = steps(norm, mine[:_STEPS], mine[_STEPS:])
    return errors(found, exact.double(), tensors)


def trained_on_gpu(
    sizes: list[int], dtype: torch.dtype, in_rows: bool, has_pytorchs: bool, group: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of this package's norm, and the relative differences of its results from
    PyTorch's, if they are computed too. The host must not wait for the GPU meanwhile."""
    torch.manual_seed(0)
    tensors = drawn(sizes, dtype, in_rows, "cuda")
    exact = new_norm(nn.BatchNorm2d)
    norm = new_norm(synchronised.SyncBatchNorm, exact, process_group=group).cuda()
    theirs = new_norm(nn.SyncBatchNorm, exact, process_group=group).cuda()
    mine = [one[dist.get_rank()] for one in tensors]
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # the first one waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = steps(norm, mine[:_STEPS], mine[_STEPS:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    differences = {}
    if has_pytorchs:
        expected = steps(theirs, mine[:_STEPS], mine[_STEPS:])
        assert expected.keys() == found.keys()
        pairs = {name: (found[name].double(), expected[name].double()) for name in found}
        differences = {
            name: ((one - other).norm() / other.norm().clamp(min=1e-30)).item()
            for name, (one, other) in pairs.items()
        }
    return errors(found, exact.double().cuda(), tensors), differences


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within the context this package's synchronised norms compute on a CPU."""
    functions = {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _elemt,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_elemt,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synchronised, "_DEVICE", "cpu")
        for name, function in functions.items():
            patch.setattr(torch, name, function)
        yield


def _by_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(input, (0, 2, 3), correction=0)
    return mean, (var + eps).rsqrt()


def _gather_stats(
    input: Tensor,
    means: Tensor,
    inv_stds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dtype == (input if running_mean is None else running_mean).dtype
    n, mean, squares = 0, torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for m, inv_std, count in zip(means, inv_stds, counts.tolist(), strict=True):
        v = (inv_std**-2 - eps) * count
        factor = 1.0 / (n + count)
        squares += v + (mean - m) ** 2 * n * count * factor
        mean = n * factor * mean + count * factor * m
        n += int(count)  # the kernel's is of whole numbers, too
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(squares / (n - 1), momentum)
    return mean, (squares / n + eps).rsqrt()


def _elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    eps: float,
) -> Tensor:
    z = (input - _by_channel(mean)) * _by_channel(inv_std)
    return z if weight is None or bias is None else z * _by_channel(weight) + _by_channel(bias)


def _backward_reduce(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    *needed: bool,
) -> tuple[Tensor, ...]:
    total = grad.sum((0, 2, 3))
    products = (grad * (input - _by_channel(mean))).sum((0, 2, 3))
    return total, products, products * inv_std, total.clone()


def _backward_elemt(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    total: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype is torch.int32
    count = counts.sum()
    scale = inv_std if weight is None else inv_std * weight
    slope = _by_channel(products / count * inv_std**2)
    centred = grad - _by_channel(total / count) - (input - _by_channel(mean)) * slope
    return centred * _by_channel(scale)
