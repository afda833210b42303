"""Runs the kernels of batch norms on the emulation of CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.recipe import Address, KernelLaunch
from cudnn_autotune.norms.plan import Form, NormPlan, NormProblem, plan_norm
from cudnn_autotune.norms.plan import problem_of as problem_of_call
from cudnn_autotune.norms.reference import (
    NORM_ACTIVATIONS,
    BackwardOperands,
    Operands,
    has_mask,
    mask_size,
    packed_mask,
)
from support.cuda_emulation import launch_kernel
from support.cuda_emulation.checks import H200, are_bands_whole, between_bands
from support.norms.cases import EPS, Norm, Results

SMALL = replace(H200, multiprocessors=5)
"""So small a GPU that a few blocks fill it."""
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative errors of outputs and gradients by dtype."""
MOMENTUM = 0.3
_NAN_BYTE = 0xFF
_NONE = torch.empty(0)


@dataclass(frozen=True)
class Schedule:
    """The launches of each plan, one after the other, and when their blocks run."""

    resident: int = 1 << 20
    """Blocks that are there together; others start when one of them ends."""
    seed: int = 0
    """That of a random order; 0 for the order of indices."""
    launches: int = 1


TOGETHER = Schedule()


def problem_of(given: Norm, *, is_backward: bool, alignment: int = 16) -> NormProblem:
    """The problem of a norm whose gradients are all asked for."""
    has_residual = given.residual is not None
    is_masked = has_mask(given.residual, given.activation) and mask_size(given.input) > 0
    by_mask = is_masked and alignment == 16
    if not is_backward:
        forward = problem_of_call(Operands(*given.operands), alignment)
        return replace(forward, mask=by_mask)
    vector = given.input.new_empty(given.input.shape[1])
    saved = None
    if has_residual and NORM_ACTIVATIONS[given.activation].by_output:
        saved = vector.to(torch.uint8) if by_mask else given.input
    operands = BackwardOperands(
        *(given.grad_output, given.grad_output_2, given.input, saved, given.weight, given.bias),
        *(given.residual, vector, vector, given.activation, (True, True, True, has_residual)),
    )
    return problem_of_call(operands, alignment)


def _run(
    plan: NormPlan,
    problem: NormProblem,
    pointers: list[Tensor | None],
    *,
    is_reversed: bool,
    schedule: Schedule,
) -> None:
    """Launches a plan; ``pointers`` are its tensors but for the workspace's."""

    def bytes_of(size: int, value: int) -> Tensor:
        room = torch.full((size,), value, dtype=torch.uint8)
        return between_bands(room, torch.contiguous_format)

    workspace = [bytes_of(plan.sums_bytes, _NAN_BYTE)]
    if problem.is_backward:
        workspace.append(bytes_of(plan.totals_bytes, _NAN_BYTE))
    # Those of slabs, then the claims of blocks, as earlier launches leave them.
    initial = torch.full((plan.counters,), 4, dtype=torch.int64)
    initial[: plan.slabs] = 3 * plan.parts
    counters = between_bands(initial, torch.contiguous_format)
    workspace.append(counters)
    buffers = {str(i): tensor for i, tensor in enumerate([*pointers, *workspace])}
    arguments: list[object] = [
        Address(name) if tensor is not None else Address("none")  # type: ignore[arg-type]
        for name, tensor in buffers.items()
    ]
    given = {name: tensor for name, tensor in buffers.items() if tensor is not None}
    sizes = (problem.batch, problem.channels, problem.spatial)
    arguments += [*sizes, plan.slabs, plan.parts, plan.tile]
    if not problem.is_backward:
        arguments += [EPS, MOMENTUM]
    each = torch.full_like(initial, 2)
    each[: plan.slabs] = plan.parts
    for i, launch in enumerate(plan.launches * schedule.launches):
        one = KernelLaunch(
            launch.kernel,
            (launch.blocks, 1, 1),
            (launch.threads, 1, 1),
            tuple(arguments),  # type: ignore[arg-type]
            launch.shared_bytes,
        )
        launch_kernel(
            one,
            {**given, "none": _NONE},
            is_reversed=is_reversed,
            resident=schedule.resident,
            seed=schedule.seed and schedule.seed + i,
        )
    assert torch.equal(counters, initial + schedule.launches * each)
    for name, tensor in given.items():
        assert are_bands_whole(tensor), f"something is written outside of argument {name}"


def by_kernels(
    given: Norm,
    gpu: Gpu,
    form: Form,
    *,
    is_reversed: bool = False,
    alignment: int = 16,
    wants_input: bool = True,
    wants_residual: bool = True,
    running: Sequence[Tensor] = (),
    schedule: Schedule = TOGETHER,
    plans: list[NormPlan] | None = None,
) -> Results:
    """The results of the kernels, forward and backward, on tensors between guard bands.

    Args:
        wants_input, wants_residual: Whether the gradients of the input and of the residual are
            asked for.
        running: The running mean and variance, which are updated.
        plans: Receives the plans that were run.
    """

    def banded(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        aligned = max(alignment, tensor.element_size())
        return between_bands(tensor, torch.preserve_format, aligned)

    def empty(like: Tensor | None) -> Tensor | None:
        return None if like is None else torch.full_like(like, float("nan"))

    input = given.input
    of_channels = torch.empty(input.shape[1], dtype=torch.float32)
    x, residual = banded(input), banded(given.residual)
    weight, bias = banded(given.weight), banded(given.bias)
    output = banded(empty(input))
    found = [banded(empty(of_channels)) for _ in range(3)]
    forward = problem_of(given, is_backward=False, alignment=alignment)
    plan = plan_norm(forward, gpu, form)
    mask = None
    if forward.mask:
        mask = between_bands(
            torch.full((mask_size(input),), 0xAA, dtype=torch.uint8), torch.contiguous_format
        )
    statistics = [banded(values) for values in running] or [None, None]
    pointers = [x, weight, bias, residual, output, *found, mask, *statistics]
    _run(plan, forward, pointers, is_reversed=is_reversed, schedule=schedule)
    for values, updated in zip(running, statistics, strict=False):
        assert updated is not None
        values.copy_(updated)
    if mask is not None:
        assert output is not None
        assert torch.equal(mask, packed_mask(output, given.activation))

    backward = replace(
        problem_of(given, is_backward=True, alignment=alignment),
        grad_input=wants_input,
        grad_residual=wants_residual and given.residual is not None,
    )
    value = (
        mask
        if backward.mask
        else output
        if backward.by_output
        else residual
        if backward.residual
        else None
    )
    grads = [
        banded(empty(input if wants_input else None)),
        *(banded(empty(values)) for values in (given.weight, given.bias)),
        banded(empty(given.residual if wants_residual else None)),
    ]
    pointers = [
        *(banded(given.grad_output), banded(given.grad_output_2), x, value, weight, bias),
        *found[:2],
        *grads,
    ]
    backward_plan = plan_norm(backward, gpu, form)
    _run(backward_plan, backward, pointers, is_reversed=is_reversed, schedule=schedule)
    if plans is not None:
        plans += [plan, backward_plan]
    assert output is not None
    return Results(output, *found, *grads)  # type: ignore[arg-type]


def group_norm_by_kernels(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    gpu: Gpu,
    form: Form,
    *,
    is_reversed: bool = False,
    alignment: int = 16,
    activation: str = "identity",
    schedule: Schedule = TOGETHER,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the mean and the inverse deviation of each group by the kernels, which read and
    write tensors between guard bands.

    Args:
        input: (N, C, *spatial), contiguous.
    """
    batch, channels = input.shape[:2]
    problem = NormProblem(
        is_backward=False,
        dtype=input.dtype,
        parameters=input.dtype if weight is None else weight.dtype,
        batch=channels // groups,
        channels=batch * groups,
        spatial=input[0, 0].numel(),
        planes=True,
        alignment=alignment,
        activation=activation,
        groups=groups,
    )

    def banded(tensor: Tensor) -> Tensor:
        aligned = max(alignment, tensor.element_size())
        return between_bands(tensor, torch.contiguous_format, aligned)

    output = banded(torch.full_like(input, float("nan")))
    mean, inv_std = (banded(torch.full((batch, groups), float("nan"))) for _ in range(2))
    pointers = [
        *(banded(input), *(None if one is None else banded(one) for one in (weight, bias))),
        *(None, output, mean, inv_std, *[None] * 4),
    ]
    plan = plan_norm(problem, gpu, form)
    _run(plan, problem, pointers, is_reversed=is_reversed, schedule=schedule)
    return output, mean, inv_std


def group_norm_in_channels_last(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    grad_output: Tensor,
    gpu: Gpu,
    form: Form,
    *,
    is_reversed: bool = False,
    alignment: int = 16,
    wants_input: bool = True,
    schedule: Schedule = TOGETHER,
) -> tuple[Tensor, ...]:
    """The output, the mean and the inverse deviation of each group, and the gradients of input,
    weight and bias by the kernels, which read and write tensors between guard bands.

    Args:
        input, grad_output: (N, C, *spatial), in the order (N, *spatial, C) in memory.
    """
    batch, channels = input.shape[:2]
    forward = NormProblem(
        is_backward=False,
        dtype=input.dtype,
        parameters=torch.float32 if weight is None else weight.dtype,
        batch=batch,
        channels=channels,
        spatial=input[0, 0].numel(),
        planes=False,
        alignment=alignment,
        activation="identity",
        groups=groups,
    )
    backward = replace(forward, is_backward=True, grad_input=wants_input)

    def banded(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        aligned = max(alignment, tensor.element_size())
        return between_bands(tensor, torch.preserve_format, aligned)

    def empty(like: Tensor) -> Tensor | None:
        return banded(torch.full_like(like, float("nan")))

    run = partial(_run, is_reversed=is_reversed, schedule=schedule)
    x, scale, shift = (banded(one) for one in (input, weight, bias))
    output, *found = empty(input), *(empty(torch.empty(batch, groups)) for _ in range(2))
    plan = plan_norm(forward, gpu, form)
    run(plan, forward, [x, scale, shift, None, output, *found, *[None] * 4])
    of_images = [empty(torch.empty(batch, channels)) for _ in range(2)]
    grads = [empty(input) if wants_input else None, *of_images]
    plan = plan_norm(backward, gpu, form)
    given = [banded(grad_output), None, x, None, scale, shift, *found]
    run(plan, backward, [*given, *grads, None])
    return (output, *found, grads[0], *(one.sum(0) for one in of_images))  # type: ignore[union-attr,return-value]
