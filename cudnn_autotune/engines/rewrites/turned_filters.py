"""A convolution of stride 1 as the gradient of an input, and such a gradient as a convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.kernels import sources
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import (
    Address,
    EngineLaunch,
    Kernel,
    KernelLaunch,
    Recipe,
    workspace_room,
)
from cudnn_autotune.engines.rewrites.division import divisor
from cudnn_autotune.engines.rewrites.rewrite import (
    Rewrite,
    is_channels_last,
    may_use_half,
    may_use_tf32,
)

_SOURCE = sources.source() + "".join(
    sources.text(name, __package__) for name in ("division.cuh", "turn_filters.cu")
)
_THREADS = 256
_TILE = 32
"""Rows and columns of a tile of ``turn_filters``."""
_LEAST_TAPS = 16
"""Taps of a filter from which the rewrite is offered."""
_IN_WORKSPACE = 32
"""The alignment of tensors in the workspace, in bytes, as problems have it."""


class TurnedFilters(Rewrite):
    """Solves fprop by engines for dgrad, and dgrad by engines for fprop.

    With stride 1, dilation d, kernel k and padding p, input pixel i meets tap t at output pixel
    ``o = i + p - d t``. With the taps in reverse order, ``t' = k - 1 - t``, and
    ``p' = d (k - 1) - p``, that is ``i = o + p' - d t'``: the same sums, in which input and output
    have changed places. So the output is the gradient of an input for the filters

        ``w'[g, c, k, t] = w[g, k, c, taps - 1 - t]``

    of each group g, and the gradient of an input is an output. cuDNN has engines with tensor cores
    for one of them where it has none for the other, as for grouped convolutions with long filters.
    A bias is added behind the engine, as PyTorch adds it.

    Values that are not finite go where the engine sends them.
    """

    name = "turned_filters"
    files = ("turn_filters.cu",)

    def form(self, problem: ConvProblem, gpu: Gpu) -> _Turned | None:
        """Returns a form of a grouped problem with long filters, unless it is padded by more than
        the filters reach."""
        if problem.op == "wgrad" or problem.residual or problem.activation:
            return None
        if problem.groups == 1 or 1 in (
            problem.weight_shape[1],
            problem.weight_shape[0] // problem.groups,
        ):
            return None
        if not may_use_half(problem, gpu) and not may_use_tf32(problem, gpu):
            return None
        if max(problem.stride) > 1 or math.prod(problem.weight_shape[2:]) < _LEAST_TAPS:
            return None
        kernel = problem.weight_shape[2:]
        reach = [d * (k - 1) for d, k in zip(problem.dilation, kernel, strict=True)]
        padding = [r - p for r, p in zip(reach * 2, problem.padding, strict=True)]
        if min(padding) < 0:
            return None
        k, c, *taps = problem.weight_shape
        groups = problem.groups
        x_alignment, _, y_alignment = problem.alignment
        inner = replace(
            problem,
            op="dgrad" if problem.op == "fprop" else "fprop",
            input_shape=problem.output_shape,
            weight_shape=(c * groups, k // groups, *taps),
            padding=tuple(padding),
            alignment=(y_alignment, _IN_WORKSPACE, x_alignment),
            bias=False,
        )
        return _Turned(problem, inner)


@dataclass(frozen=True)
class _Turned:
    """A problem, and the one with turned filters whose input is its output."""

    problem: ConvProblem
    inner: ConvProblem

    def recipe(self, engine_text: str) -> Recipe:
        turned = Address("workspace", 0)
        launches: list[KernelLaunch | EngineLaunch] = [
            _turn(self.problem, turned),
            EngineLaunch(self.inner, engine_text, Address("y"), turned, Address("x")),
        ]
        if self.problem.bias:
            launches.append(_add_bias(self.problem))
        size = math.prod(self.problem.weight_shape) * self.problem.dtype.itemsize
        return Recipe(tuple(launches), workspace_room(size))


def _kernel(problem: ConvProblem, function: str) -> Kernel:
    defines: dict[str, str | int] = {
        "ELEMENT": sources.ELEMENTS[problem.dtype],
        "ELEMENT_BYTES": problem.dtype.itemsize,
        "CHANNELS_LAST": int(is_channels_last(problem)),
        "THREADS": _THREADS,
    }
    return Kernel(_SOURCE, function, tuple(defines.items()))


def _turn(problem: ConvProblem, target: Address) -> KernelLaunch:
    k, c, *kernel = problem.weight_shape
    rows, taps, count = k // problem.groups, math.prod(kernel), math.prod(problem.weight_shape)
    tiles = -(-rows // _TILE) * -(-c // _TILE)
    is_tiled = is_channels_last(problem)
    blocks = tiles * taps * problem.groups if is_tiled else -(-count // _THREADS)
    return KernelLaunch(
        _kernel(problem, "turn_filters"),
        (blocks, 1, 1),
        (_THREADS, 1, 1),
        (
            *(target, Address("w"), count),
            *(divisor(rows), divisor(c), divisor(taps), divisor(tiles)),
        ),
        shared_bytes=_TILE * (_TILE + 1) * problem.dtype.itemsize if is_tiled else 0,
    )


def _add_bias(problem: ConvProblem) -> KernelLaunch:
    shape = problem.output_shape
    count = math.prod(shape)
    inner = 1 if is_channels_last(problem) else math.prod(shape[2:])
    return KernelLaunch(
        _kernel(problem, "add_bias"),
        (-(-count // _THREADS), 1, 1),
        (_THREADS, 1, 1),
        (Address("y"), Address("bias"), count, divisor(shape[1]), divisor(inner)),
    )
