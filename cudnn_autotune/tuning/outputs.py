"""The judge of outputs: whether programs that compute the same return the same, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from cudnn_autotune.tuning.tolerances import TOLERANCES

# A deep network amplifies rounding, by a factor that depends on its weights. So the noise of a
# program is measured: the output's change if its inputs change in their last place. Correct
# programs of 7 architectures were 0.5 to 0.9 times the noise apart (docs/reference/backend.md).
_NOISE_FACTOR = 2.0

# A wrong program is about 1 away, however large the noise is.
_MOST_ALLOWED = 0.5

# A gradient may be nothing but noise, as that of a bias before a norm. Such a one tells nothing.
_MOST_NOISE = 0.5

# The least numbers of a gradient whose noise is known well enough. Smaller ones are joined.
_LEAST_NUMBERS = 64


def difference(
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    reference: Callable[[Any], Sequence[Tensor]],
    inputs: Any,
    gradients: int = 0,
    dtypes: Collection[torch.dtype] = (),
) -> str | None:
    """Describes a difference of outputs beyond rounding; None if there is none.

    Rounding explains the tolerance of the output's dtype and twice the noise, at most 0.5. The
    noise is the relative change of the reference's output when its inputs change in their last
    place. It is measured only if the tolerance alone does not suffice. Gradients have no such
    limit, but one with more noise than 0.5 is not compared. Those of fewer than 64 numbers are
    compared as one. Under autocast the tolerance of gradients is that of the least precise dtype.

    Only floating-point outputs are compared by value: the index of the largest of equal values may
    differ.

    Args:
        expected: the reference's outputs.
        actual: the other program's outputs.
        reference: returns the reference's outputs for other inputs, in new memory. It is called
            once at most.
        inputs: the reference's inputs, in any nest of containers of ``torch.utils._pytree``. They
            are not changed. Without floating-point tensors among them, as for a model of token ids,
            the noise is 0.
        gradients: the number of gradients, which are the last ones of the outputs.
        dtypes: dtypes in which the programs compute, beside those of the outputs.
    """
    if (text := _mismatch(expected, actual)) is not None:
        return text
    compared = [i for i, one in enumerate(expected) if one.dtype in TOLERANCES]
    outputs = len(expected) - gradients
    computed = [TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES]
    least_step = max((one.step for one in computed), default=0.0)
    names = {i: f"output {i}" if i < outputs else f"gradient {i - outputs}" for i in compared}
    for i in compared:
        if not torch.equal(torch.isfinite(expected[i]), torch.isfinite(actual[i])):
            return f"{names[i]} is not finite in other places"
    errors = {i: _relative_error(expected[i], actual[i]) for i in compared}
    few = [i for i in compared if i >= outputs and expected[i].numel() < _LEAST_NUMBERS]
    parts = [(names[i], [i]) for i in compared if i not in few]
    if few:
        parts.append(("the rest of the gradients", few))
    noises: list[float] | None = None
    for name, places in parts:
        is_output = places[0] < outputs
        rounded = [TOLERANCES[expected[i].dtype] for i in places] + computed * (not is_output)
        tolerance = max(one.program for one in rounded)
        sizes = {i: expected[i].numel() for i in places}
        if _joint(errors, sizes) <= tolerance:
            continue
        if noises is None:
            noises = _noises(expected, reference, inputs, least_step)
        if not is_output:
            sizes = {i: size for i, size in sizes.items() if noises[i] <= _MOST_NOISE}
            if sum(sizes.values()) < _LEAST_NUMBERS:
                continue
        noise, error = _joint(noises, sizes), _joint(errors, sizes)
        allowed = tolerance + _NOISE_FACTOR * noise
        if is_output:
            allowed = min(allowed, _MOST_ALLOWED)
        if error > allowed:
            return (
                f"{name} has a relative error of {error:.2g}, allowed is {allowed:.2g} "
                f"(noise {noise:.2g})"
            )
    return None


def _joint(errors: Mapping[int, float] | Sequence[float], sizes: Mapping[int, int]) -> float:
    """Returns the relative error of several tensors, each as important as it has numbers.

    Args:
        errors: relative errors of tensors, by their places.
        sizes: the number of numbers of each of these tensors, by its place.
    """
    squares = sum(size * errors[place] ** 2 for place, size in sizes.items())
    return math.sqrt(squares / max(1, sum(sizes.values())))


def _mismatch(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """Describes a difference of outputs in number, shape or dtype; None if there is none."""
    if len(expected) != len(actual):
        return f"it has {len(actual)} outputs, expected {len(expected)}"
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"output {index} is {tuple(other.shape)} of {other.dtype}, expected "
                f"{tuple(one.shape)} of {one.dtype}"
            )
    return None


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the norm of the difference over that of ``expected``, of elements finite in both."""
    finite = torch.isfinite(expected) & torch.isfinite(actual)
    a, b = (torch.where(finite, tensor, 0).double() for tensor in (expected, actual))
    return (torch.dist(a, b) / a.norm().clamp_min(1e-30)).item()


def _noises(
    expected: Sequence[Tensor],
    reference: Callable[[Any], Sequence[Tensor]],
    inputs: Any,
    least_step: float,
) -> list[float]:
    """Returns the change of each output if the inputs change in their last place; 0 for one that is
    not compared by value."""
    # Under autocast outputs and intermediate results are less precise than inputs.
    steps = [TOLERANCES[one.dtype].step for one in expected if one.dtype in TOLERANCES]
    step = max(least_step, *steps)
    moved = reference(tree_map(lambda value: _perturbed(value, step), inputs))
    if _mismatch(expected, moved) is not None:  # sizes may depend on the data
        return [0.0] * len(expected)
    return [
        _relative_error(one, other) if one.dtype in TOLERANCES else 0.0
        for one, other in zip(expected, moved, strict=True)
    ]


@torch.no_grad()
def _perturbed(value: Any, least_step: float) -> Any:
    """Returns a copy of a floating-point tensor, in the same layout, with each element times 1 +
    step or 1 - step at random; any other value itself. The copy requires a gradient if the tensor
    does."""
    is_plain = type(value) in (Tensor, Parameter) and value.layout == torch.strided
    if not is_plain or value.dtype not in TOLERANCES or value.numel() == 0:
        return value
    step = max(TOLERANCES[value.dtype].step, least_step)
    # Compiled programs rely on the strides. A clone of a slice or expanded tensor has others.
    dimensions = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in dimensions)
    memory = value.as_strided((span,), (1,), value.storage_offset())
    generator = torch.Generator(value.device).manual_seed(0)
    grows = torch.rand(span, generator=generator, device=value.device) < 0.5
    changed = torch.where(grows, memory * (1 + step), memory * (1 - step))
    changed = torch.where(changed.isfinite(), changed, memory)  # the largest number of the dtype
    return changed.as_strided(value.shape, value.stride(), 0).requires_grad_(value.requires_grad)
