"""Contiguous problems, by the package's kernels for channels_last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from cudnn_autotune.engines.implementations import Gpu, Implementation, Offer
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem, as_images
from cudnn_autotune.engines.recipe import (
    RESULTS,
    Address,
    Argument,
    Buffer,
    KernelLaunch,
    Recipe,
    workspace_room,
)
from cudnn_autotune.kernels.depthwise.depthwise_wgrad import DepthwiseWgrad
from cudnn_autotune.kernels.depthwise.depthwise_wgrad_mma import DepthwiseWgradMma
from cudnn_autotune.kernels.few_channels.few_channels import FewChannels
from cudnn_autotune.kernels.few_channels.few_channels_wgrad import FewChannelsWgrad
from cudnn_autotune.kernels.grouped.grouped import Grouped
from cudnn_autotune.kernels.grouped.grouped_wgrad import GroupedWgrad
from cudnn_autotune.kernels.hopper.implicit_gemm_1d import ImplicitGemm1d
from cudnn_autotune.kernels.hopper.implicit_gemm_1d_wgrad import ImplicitGemm1dWgrad
from cudnn_autotune.kernels.rewrites.transpose import (
    LEAST_ALIGNED,
    Transposition,
    is_same,
    to_channels_last,
    to_contiguous,
    transpose,
)
from cudnn_autotune.kernels.sources import version_of

_INNER: tuple[Implementation, ...] = (
    DepthwiseWgrad(),
    FewChannels(),
    FewChannelsWgrad(),
    Grouped(),
    GroupedWgrad(),
    ImplicitGemm1d(),
    ImplicitGemm1dWgrad(),
)
"""Kernels that are worth the transpositions on an H200. Their time in channels_last, 2 x 3 us for
two launches, and the tensors' bytes once more at 3 TB/s are together less than the best contiguous
time. ``depthwise`` is not among them: for its layers ``depthwise_planes`` takes less."""
_CONTIGUOUS = DepthwiseWgradMma()
"""A kernel for contiguous tensors, which takes less if it computes the problem."""
_MOST_OFFERS = 3
_IN_WORKSPACE = 32
"""The alignment of tensors in the workspace, in bytes, in the problems' terms."""


class ChannelsLast:
    """A rewrite of a contiguous problem: its operands are transposed to channels_last for one of
    the package's kernels, and the result is transposed back.

    Settings are the inner implementation's name and settings, ``name:settings``. A tensor with one
    channel or one pixel lies alike in both layouts, and is used as it is. A NaN or an infinity
    spreads as in that implementation.
    """

    name = "channels_last"
    version = version_of(__name__)

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        return [offer for offer, _ in _offered(problem, gpu)]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        for offer, implementation in _offered(problem, gpu):
            if offer.settings == settings:
                inner_settings = settings.removeprefix(f"{implementation.name}:")
                inner = implementation.recipe(_inner(problem), inner_settings, gpu)
                return _around(problem, inner)
        raise ValueError(f"settings: {self.name} does not offer {settings!r} for {problem.text}")


def _offered(problem: ConvProblem, gpu: Gpu) -> list[tuple[Offer, Implementation]]:
    """Returns offers with their inner implementations."""
    if (
        problem.memory_format != torch.contiguous_format
        or min(problem.alignment) < LEAST_ALIGNED
        or _CONTIGUOUS.offers(problem, gpu)
    ):
        return []
    inner = _inner(problem)
    own_bytes = sum(_room(problem, name) for name in _transposed(problem))
    found = [(offer, one) for one in _INNER for offer in one.offers(inner, gpu)]
    return [
        (
            replace(
                offer,
                settings=f"{one.name}:{offer.settings}",
                workspace_bytes=own_bytes + offer.workspace_bytes,
            ),
            one,
        )
        for offer, one in found[:_MOST_OFFERS]
    ]


def _shape(problem: ConvProblem, name: Buffer) -> tuple[int, ...]:
    if name == "x":
        return problem.input_shape
    return problem.weight_shape if name == "w" else problem.output_shape


def _transposed(problem: ConvProblem) -> Iterator[Buffer]:
    """Yields the tensors with another order in channels_last."""
    names: list[Buffer] = ["x", "w", "y"]
    if problem.residual:
        names.append("residual")
    return (name for name in names if not is_same(_shape(problem, name)))


def _inner(problem: ConvProblem) -> ConvProblem:
    """Returns the problem in channels_last, a 1-d one with images of height 1. Its transposed
    tensors lie in the workspace."""
    transposed = set(_transposed(problem))
    x, w, y = (
        _IN_WORKSPACE if name in transposed else alignment
        for name, alignment in zip(("x", "w", "y"), problem.alignment, strict=True)
    )
    images = as_images(problem) if problem.spatial_dims == 1 else problem
    return replace(images, memory_format=CHANNELS_LAST[images.spatial_dims], alignment=(x, w, y))


def _room(problem: ConvProblem, name: Buffer) -> int:
    """Returns the bytes in the workspace of a transposed tensor."""
    return workspace_room(math.prod(_shape(problem, name)) * problem.dtype.itemsize)


def _around(problem: ConvProblem, inner: Recipe) -> Recipe:
    """Returns a recipe with the transpositions, and the inner one's workspace behind theirs."""
    places: dict[Buffer, Address] = {}
    used = 0
    for name in _transposed(problem):
        places[name] = Address("workspace", used)
        used += _room(problem, name)
    before: list[Transposition] = []
    behind: list[Transposition] = []
    for name, place in places.items():
        shape = _shape(problem, name)
        if name == RESULTS[problem.op]:
            behind.append(to_contiguous(shape, place, Address(name)))
        else:
            before.append(to_channels_last(shape, Address(name), place))
    places["workspace"] = Address("workspace", used)
    launches = [_moved(launch, places) for launch in inner.launches]
    if before:
        launches.insert(0, transpose(before, problem.dtype))
    if behind:
        launches.append(transpose(behind, problem.dtype))
    return Recipe(tuple(launches), used + inner.workspace_bytes)


def _moved(launch: object, places: dict[Buffer, Address]) -> KernelLaunch:
    """Returns a kernel's launch with its addresses moved to the tensors' places."""
    assert isinstance(launch, KernelLaunch)
    return replace(launch, arguments=tuple(_argument(a, places) for a in launch.arguments))


def _argument(argument: Argument, places: dict[Buffer, Address]) -> Argument:
    if not isinstance(argument, Address) or argument.buffer not in places:
        return argument
    place = places[argument.buffer]
    return Address(place.buffer, place.offset + argument.offset)
