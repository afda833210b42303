"""The plan of a batch or group norm: its kernels, and their division of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.kernels.sources import ELEMENTS, activation_macros, source, version_of
from cudnn_autotune.norms.reference import (
    MASKED_BYTES,
    NORM_ACTIVATIONS,
    BackwardOperands,
    Operands,
    dense,
    has_mask,
    mask_size,
)

Form = Literal["kept", "half kept", "two passes"]
FORMS: tuple[Form, ...] = ("kept", "half kept", "two passes")
"""The forms: one launch that keeps tensors in shared memory that it would read twice (a backward
has two, and may keep one of them), or two launches, which read them twice."""

VERSION = version_of(__name__)
"""The digest of the sources that decide a form's speed and results."""

_SEGMENT_BYTES = 128
"""Neighbouring bytes of a row in a block's read: a line of the cache."""
_FIRST_WITH_COPIES = (8, 0)
"""The first compute capability with asynchronous copies to shared memory."""
_KEPT_THREADS = 512
_PASS_THREADS = 256
_PASS_BLOCKS = {False: 3, True: 2}
"""Blocks of a multiprocessor for which a pass of a forward and of a backward has registers."""
_MOST_PARTS = 512
"""The most parts of a slab; a block may compute all (``kMostParts`` of tile.cuh)."""
_ROUND_BYTES = 48 << 10
"""Bytes that a multiprocessor could read during the wait of a slab's blocks for each other."""
_LEAST_STEPS = 2
"""The least vectors of a thread in a pass, if the tensor has enough."""


@dataclass(frozen=True)
class NormProblem:
    """A call of ``batch_norm_act`` or of its backward, as far as its kernels depend on it.

    A group norm has ``groups``. If it is contiguous, ``batch`` is the number of channels in a
    group, and ``channels`` are the groups of all images.
    """

    is_backward: bool
    dtype: torch.dtype
    parameters: torch.dtype
    """The dtype of weight and bias, and of their gradients."""
    batch: int
    channels: int
    spatial: int
    """Product of the spatial sizes."""
    planes: bool
    """Whether the tensors are contiguous, and not in channels_last."""
    alignment: int
    """Alignment in bytes, a power of two, of all tensors but vectors."""
    activation: str
    residual: bool = False
    """Whether a residual is added; in a backward, whether the derivative's argument has one."""
    by_output: bool = False
    """Whether the activation's derivative is a function of the output."""
    second: bool = False
    """Whether a second gradient of the output is added to the first one."""
    grad_residual: bool = False
    """Whether the gradient of the residual is needed."""
    grad_input: bool = True
    """Whether the gradient of the input is needed."""
    mask: bool = False
    """Whether a forward writes a mask, and a backward reads it instead of the output."""
    groups: int = 0
    """Number of groups of a group norm; 0 for a batch norm."""

    @property
    def of_group(self) -> int:
        """Channels of a group in channels_last; 0 for other norms."""
        return self.channels // self.groups if self.groups and not self.planes else 0

    @property
    def count(self) -> int:
        """Values of a channel that are added up."""
        return self.spatial if self.of_group else self.batch * self.spatial

    @property
    def vector(self) -> int:
        """Numbers in one read."""
        most = self.channels
        if self.planes:
            most = self.count if self.groups else self.spatial
        numbers = 16 // self.dtype.itemsize
        while most % numbers or numbers * self.dtype.itemsize > self.alignment:
            numbers //= 2
        return numbers


def problem_of(given: Operands | BackwardOperands, alignment: int = 16) -> NormProblem:
    """Returns the problem of a call, as csrc/norm/norm_cuda.cpp does. The values of tensors are not
    read: they may be fake.

    Args:
        alignment: bytes; of all tensors but vectors.
    """
    activation = NORM_ACTIVATIONS[given.activation]
    parameters = (p.dtype for p in (given.weight, given.bias) if p is not None)
    shape, strides, dtype = given.input.shape, given.input.stride(), given.input.dtype
    input = dense(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    spatial = math.prod(input.shape[2:])
    forward = NormProblem(
        is_backward=False,
        dtype=dtype,
        parameters=next(parameters, torch.float32),
        batch=input.shape[0],
        channels=input.shape[1],
        spatial=spatial,
        planes=spatial > 1 and input.is_contiguous(),
        alignment=alignment,
        activation=given.activation,
    )
    if isinstance(given, Operands):
        by_mask = has_mask(given.residual, given.activation) and mask_size(input) > 0
        return replace(forward, residual=given.residual is not None, mask=by_mask)
    by_mask = given.output is not None and given.output.dtype == torch.uint8
    by_output = given.output is not None and not by_mask and activation.by_output
    needs_argument = given.activation != "identity" and not (by_output or by_mask)
    return replace(
        forward,
        is_backward=True,
        planes=forward.planes and not by_mask,
        residual=given.residual is not None and needs_argument,
        by_output=by_output,
        second=given.grad_output_2 is not None,
        grad_residual=given.output_mask[3],
        grad_input=given.output_mask[0],
        mask=by_mask,
    )


@dataclass(frozen=True)
class NormLaunch:
    """One launch of a kernel. Its arguments are the operation's, then the division."""

    kernel: Kernel
    blocks: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class NormPlan:
    """The launches of a norm, and their common division and workspace."""

    launches: tuple[NormLaunch, ...]
    slabs: int
    parts: int
    tile: int
    counters: int
    """Number of counters of 8 bytes, which are zero before the first launch; none if no blocks
    meet. Launches with the same counters do not overlap, and have the same grid and division."""
    sums_bytes: int
    totals_bytes: int


@dataclass(frozen=True)
class _Division:
    """The division of a tensor, as tile.cuh defines it."""

    lanes: int
    slabs: int
    parts: int
    tile: int
    together: int
    """Slabs of a launch at a time."""


def unsupported_by_kernels(problem: NormProblem) -> str | None:
    """Returns the reason why no kernel computes a problem, or None."""
    if problem.dtype not in ELEMENTS or problem.parameters not in ELEMENTS:
        return f"kernels compute in {', '.join(map(str, ELEMENTS))}"
    if problem.activation not in NORM_ACTIVATIONS:
        return f"kernels have no activation {problem.activation!r}"
    if problem.batch * problem.spatial * problem.channels == 0:
        return "the tensor is empty"
    vector_bytes = problem.vector * problem.dtype.itemsize
    if problem.groups and problem.planes and problem.is_backward:
        return "a group norm of a contiguous tensor is computed forward"
    if problem.of_group and (problem.activation != "identity" or problem.residual):
        return "a group norm in channels_last has nothing behind it"
    if problem.mask and (problem.planes or vector_bytes != MASKED_BYTES):
        return "a mask is for rows that are read in whole vectors"
    # Sums of offsets below must not overflow either.
    if problem.batch * problem.spatial * problem.channels >= 2**31 - 2**20:
        return "the tensor has 2^31 elements or more"
    return None


@functools.lru_cache(maxsize=256)
def plan_norm(problem: NormProblem, gpu: Gpu, form: Form = "kept") -> NormPlan:
    """Returns the plan of a problem on a GPU.

    Args:
        form: the form with the most tensors in shared memory; fewer are kept if they do not fit.
            The default is expected to be the fastest.
    """
    whole = (2, 1) if problem.is_backward else (1,)
    for kept in {"kept": whole, "half kept": (1,), "two passes": ()}[form]:
        division = _kept_division(problem, gpu, kept)
        if division is not None:
            return _plan(problem, division, (0,), kept)
    passes = (1, 2) if problem.grad_input else (1,)
    return _plan(problem, _pass_division(problem, gpu), passes, 0)


def distinct_plans(problems: Sequence[NormProblem], gpu: Gpu) -> dict[Form, list[NormPlan]]:
    """Returns the plans of problems in each form, the expected fastest one first. Forms with the
    same plans as a form that keeps less are left out."""
    found: dict[Form, list[NormPlan]] = {}
    for form in reversed(FORMS):
        plans = [plan_norm(problem, gpu, form) for problem in problems]
        if plans not in found.values():
            found[form] = plans
    return dict(reversed(found.items()))


def _widest(problem: NormProblem) -> int:
    """Returns the most lanes that read neighbouring vectors of a row."""
    if problem.planes:
        return 1
    vectors = problem.channels // problem.vector
    lanes = 1
    while lanes < min(vectors, 32, _SEGMENT_BYTES // (problem.vector * problem.dtype.itemsize)):
        lanes *= 2
    return lanes


def _units(problem: NormProblem) -> int:
    """Returns the units of all parts of a slab: rows in channels_last, else vectors."""
    return problem.count // problem.vector if problem.planes else problem.count


def _slabs(problem: NormProblem, lanes: int) -> int:
    if problem.planes:
        return problem.channels
    slabs = -(-problem.channels // (lanes * problem.vector))
    return problem.batch * slabs if problem.of_group else slabs


def _pass_division(problem: NormProblem, gpu: Gpu) -> _Division:
    lanes = _widest(problem)
    slabs, units = _slabs(problem, lanes), _units(problem)
    blocks = gpu.multiprocessors * _PASS_BLOCKS[problem.is_backward]
    least = _LEAST_STEPS * _PASS_THREADS // lanes
    parts = max(1, min(blocks // slabs, units // least))
    tile = -(-units // parts)
    return _Division(lanes, slabs, -(-units // tile), tile, slabs)


def _kept_division(problem: NormProblem, gpu: Gpu, kept: int) -> _Division | None:
    """Returns the division of a launch that keeps some tensors; None if they do not fit."""
    vector_bytes = problem.vector * problem.dtype.itemsize
    if gpu.compute_capability < _FIRST_WITH_COPIES or vector_bytes < 4 or not problem.grad_input:
        return None
    if problem.of_group > 1:  # its channels are of several slabs, whose blocks do not meet
        return None
    units, lanes = _units(problem), _widest(problem)
    slabs, step_units = _slabs(problem, lanes), _KEPT_THREADS // lanes
    room = gpu.shared_bytes - _shared_bytes(problem, _KEPT_THREADS, lanes, 0, kept)
    most_steps = room // (kept * _KEPT_THREADS * vector_bytes)
    best: tuple[int, _Division] | None = None
    for parts in range(1, min(gpu.multiprocessors, _MOST_PARTS) + 1):
        tile = -(-units // parts)
        steps = -(-tile // step_units)
        if steps > most_steps or -(-units // tile) < parts:
            continue
        together = min(slabs, gpu.multiprocessors // parts)
        rounds = -(-slabs // together)
        waits = _ROUND_BYTES if parts > 1 else _ROUND_BYTES // 4
        cost = rounds * (steps * _KEPT_THREADS * vector_bytes + waits)
        if best is None or cost < best[0]:
            best = cost, _Division(lanes, slabs, parts, tile, together)
    return None if best is None else best[1]


def _scratch_bytes(problem: NormProblem, threads: int, lanes: int, kept: int) -> int:
    channels = 1 if problem.planes else problem.vector
    sums = max(lanes * (threads // 32) * (2 * channels + 1), 2 * threads)
    team = 16 + 2 * _MOST_PARTS if kept else 0
    return -(-(4 * (sums + 2 * lanes * channels) + team) // 128) * 128


def _shared_bytes(problem: NormProblem, threads: int, lanes: int, tile: int, kept: int) -> int:
    """Returns the bytes of shared memory of a block that keeps its part of some tensors."""
    steps = -(-tile // (threads // lanes))
    kept_bytes = kept * steps * threads * problem.vector * problem.dtype.itemsize
    return _scratch_bytes(problem, threads, lanes, kept) + kept_bytes


def _plan(
    problem: NormProblem, division: _Division, passes: tuple[int, ...], kept: int
) -> NormPlan:
    """Returns the plan of some passes of a division, whose blocks keep ``kept`` tensors."""
    threads = _KEPT_THREADS if kept else _PASS_THREADS
    channels = division.lanes * (1 if problem.planes else problem.vector)
    launches = tuple(_launch(problem, division, threads, of, kept) for of in passes)
    totals = problem.channels * (problem.batch if problem.of_group else 1)
    # One for each slab, and the claims of blocks that wait for each other.
    counters = division.slabs + (launches[0].blocks if kept else 0)
    return NormPlan(
        launches,
        division.slabs,
        division.parts,
        division.tile,
        counters if division.parts > 1 else 0,
        8 * division.slabs * division.parts * channels,
        8 * totals if problem.is_backward and not kept else 0,
    )


@functools.cache
def _code(file: str) -> str:
    return source(__package__, "tile.cuh", file)


def _launch(
    problem: NormProblem, division: _Division, threads: int, which: int, kept: int
) -> NormLaunch:
    scratch = _scratch_bytes(problem, threads, division.lanes, kept)
    defines: dict[str, str | int] = {
        "ELEMENT": ELEMENTS[problem.dtype],
        "PARAMETER": ELEMENTS[problem.parameters],
        "VECTOR": problem.vector,
        "LANES": division.lanes,
        "PLANES": int(problem.planes),
        "THREADS": threads,
        "BLOCKS": 1 if kept else _PASS_BLOCKS[problem.is_backward],
        "UNROLLED": 4,
        **dict(activation_macros("" if problem.activation == "identity" else problem.activation)),
        "PASS": which,
        "SCRATCH_BYTES": scratch,
        "MASK": int(problem.mask),
        "GROUPS": problem.groups if problem.planes else 0,
        "OF_GROUP": problem.of_group,
    }
    if problem.is_backward:
        file, function = "backward.cu", "norm_backward"
        defines["SECOND"] = int(problem.second)
        values = (problem.by_output, problem.residual, problem.mask)
        defines["VALUE"] = 1 + values.index(True) if any(values) else 0
        defines["STORES_DZ"] = int(problem.grad_residual)
        defines["KEEPS_X"] = int(kept == 2)
    else:
        file, function = "forward.cu", "norm_forward"
        defines["RESIDUAL"] = int(problem.residual)
    code = _code(file)
    blocks = division.together * division.parts
    shared = _shared_bytes(problem, threads, division.lanes, division.tile, kept)
    return NormLaunch(Kernel(code, function, tuple(defines.items())), blocks, threads, shared)
