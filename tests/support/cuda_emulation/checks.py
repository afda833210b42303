"""Compares an implementation's recipe with float64, on tensors between guard bands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.implementations import Gpu, Implementation
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import EngineLaunch, Kernel, KernelLaunch, Recipe
from support.conv.references import expected, relative_error, shapes_of, tolerance
from support.cuda_emulation import run_recipe

H200 = replace(gpu_of("h200"), device=None)
_BAND = 4096
"""Bytes before and behind a tensor: NaN in every type."""
_NAN_BYTE = 0xFF


def between_bands(
    tensor: Tensor, memory_format: torch.memory_format, alignment: int = 256
) -> Tensor:
    """Returns a dense copy with guard bands around it in its storage, at an address that is a
    multiple of ``alignment`` and of no larger power of two."""
    size = tensor.numel() * tensor.element_size()
    room = torch.full((2 * _BAND + size + 2 * alignment,), _NAN_BYTE, dtype=torch.uint8)
    begin = _BAND + (alignment - room.data_ptr() - _BAND) % (2 * alignment)
    strides = torch.empty_like(tensor, memory_format=memory_format, device="meta").stride()
    copy = room[begin : begin + size].view(tensor.dtype).as_strided(tensor.shape, strides)
    return copy.copy_(tensor)


def are_bands_whole(tensor: Tensor) -> bool:
    room = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    begin = tensor.storage_offset() * tensor.element_size()
    end = begin + tensor.numel() * tensor.element_size()
    return bool((room[:begin] == _NAN_BYTE).all() and (room[end:] == _NAN_BYTE).all())


def random_tensors(problem: ConvProblem, seed: int = 0) -> dict[str, Tensor]:
    """Normal random operands between guard bands, no better aligned than the problem says; what the
    operation writes is full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    aligned = dict(zip(("x", "w", "y"), problem.alignment, strict=True))
    tensors = {}
    for name, shape in shapes_of(problem).items():
        values = torch.randn(shape, generator=generator).to(problem.dtype)
        form = problem.memory_format if len(shape) > 1 else torch.contiguous_format
        tensors[name] = between_bands(values, form, aligned.get(name, 32))
    tensors[written(problem)].fill_(math.nan)
    return tensors


def written(problem: ConvProblem) -> str:
    return {"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op]


def check(
    implementation: Implementation,
    problem: ConvProblem,
    settings: str,
    *,
    gpu: Gpu = H200,
    is_reversed: bool = False,
    seed: int = 0,
) -> Tensor:
    """Asserts that the result is right, and that nothing else is written; returns the result.

    Args:
        is_reversed: Run threads and blocks from the last to the first.
    """
    tensors = random_tensors(problem, seed)
    offers = {offer.settings: offer for offer in implementation.offers(problem, gpu)}
    recipe = implementation.recipe(problem, settings, gpu)
    assert recipe.workspace_bytes <= offers[settings].workspace_bytes
    workspace = torch.full((recipe.workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
    buffers = {**tensors, "workspace": between_bands(workspace, torch.contiguous_format)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run_recipe(recipe, buffers, is_reversed=is_reversed)
    what = f"{problem.text} by {implementation.name}:{settings}"
    for name, buffer in buffers.items():
        assert are_bands_whole(buffer), f"{what}: it writes outside of {name}"
    result = tensors[written(problem)]
    for name, tensor in tensors.items():
        if tensor is not result:
            assert torch.equal(tensor, before[name]), f"{what}: it writes {name}"
    error = relative_error(result, expected(problem, tensors))
    allowed = tolerance(problem.dtype, problem.allow_tf32, problem.activation)
    assert error <= allowed, f"{what}: relative error {error:.3g}, allowed {allowed:.3g}"
    return result


def check_not_finite(
    implementation: Implementation,
    problem: ConvProblem,
    settings: str,
    tensors: dict[str, Tensor],
    *,
    gpu: Gpu = H200,
    inside: Any = ...,
    is_full: bool = False,
) -> None:
    """Asserts that the result is NaN and infinite where it must be, and right where it is finite.

    Args:
        tensors: Those of :func:`random_tensors`, some values of which are NaN or infinite.
        inside: An index of the elements that are compared.
        is_full: Whether none of these needs to be finite.
    """
    recipe = implementation.recipe(problem, settings, gpu)
    workspace = torch.full((recipe.workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
    run_recipe(recipe, {**tensors, "workspace": workspace})
    result = tensors[written(problem)].double()[inside]
    wanted = expected(problem, tensors)[inside]
    finite = wanted.isfinite()
    assert not finite.all()
    assert is_full or finite.any()
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.isposinf(), wanted.isposinf())
    assert torch.equal(result.isneginf(), wanted.isneginf())
    if finite.any():
        error = relative_error(result[finite], wanted[finite])
        assert error <= tolerance(problem.dtype, problem.allow_tf32, problem.activation)


def assert_compiles(recipe: Recipe, compute_capability: tuple[int, int]) -> None:
    """Asserts that NVRTC compiles the kernels of a recipe."""
    for launch in recipe.launches:
        if isinstance(launch, EngineLaunch):
            continue
        assert isinstance(launch, KernelLaunch)
        assert isinstance(launch.kernel, Kernel)
        assert cubin(launch.kernel, compute_capability)
