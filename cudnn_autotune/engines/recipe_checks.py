"""Checks of a recipe before compiling and building."""

from __future__ import annotations

import math

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import DTYPES_BY_NAME, MOST_ALIGNED, ConvProblem
from cudnn_autotune.engines.recipe import (
    WORKSPACE_ALIGNMENT,
    Address,
    EngineLaunch,
    KernelLaunch,
    Recipe,
    TensorMap,
)

_MOST_CLUSTER_BLOCKS = 8
"""Most blocks of a cluster on every GPU that has clusters."""


def check_recipe(recipe: Recipe, problem: ConvProblem, text: str) -> None:
    """Refuses addresses outside of their buffers or with too little alignment for an engine, and
    clusters and tensor maps that no GPU takes.

    Raises:
        PlanError: it names ``text``, the candidate's.
    """
    check = _Check(problem, recipe.workspace_bytes)
    try:
        for launch in recipe.launches:
            if isinstance(launch, KernelLaunch):
                check.kernel(launch)
            elif isinstance(launch, EngineLaunch):
                check.engine(launch)
    except _C.PlanError as error:
        raise _C.PlanError(f"{text}: {error}") from None


class _Check:
    def __init__(self, problem: ConvProblem, workspace_bytes: int) -> None:
        x, w, y = problem.input_shape, problem.weight_shape, problem.output_shape
        has_slope = problem.activation == "prelu"
        shapes = {
            "x": x, "w": w, "y": y, "bias": w[:1] if problem.bias else (0,),
            "residual": y if problem.residual else (0,), "slope": w[:1] if has_slope else (0,),
        }  # fmt: skip
        element = problem.dtype.itemsize
        self._bytes = {name: math.prod(shape) * element for name, shape in shapes.items()}
        self._bytes["workspace"] = workspace_bytes
        self._alignment = dict.fromkeys(shapes, MOST_ALIGNED)
        self._alignment |= dict(zip("xwy", problem.alignment, strict=True))
        self._alignment["workspace"] = WORKSPACE_ALIGNMENT

    def kernel(self, launch: KernelLaunch) -> None:
        name = launch.kernel.function
        sizes = list(zip(launch.grid, launch.cluster, strict=False))
        if not 1 <= math.prod(launch.cluster) <= _MOST_CLUSTER_BLOCKS or any(
            blocks % of_cluster for blocks, of_cluster in sizes
        ):
            raise _C.PlanError(
                f"{name}: cluster must have 1 to {_MOST_CLUSTER_BLOCKS} blocks and divide grid in "
                "each dimension"
            )
        for argument in launch.arguments:
            if isinstance(argument, Address):
                self._address(argument)
            elif isinstance(argument, TensorMap):
                self._tensor_map(argument, name)

    def engine(self, launch: EngineLaunch) -> None:
        inner, name = launch.problem, launch.engine_text
        for place, alignment in zip((launch.x, launch.w, launch.y), inner.alignment, strict=True):
            self._aligned(place, alignment, name)
        given = (launch.bias is not None, launch.residual is not None)
        if given != (inner.bias, inner.residual) or inner.activation == "prelu":
            raise _C.PlanError(f"{name} lacks a tensor of its epilogue, or is given one more")
        for added in (launch.bias, launch.residual):
            if added is not None:
                self._aligned(added, MOST_ALIGNED, name)

    def _address(self, place: Address) -> None:
        size = self._bytes.get(place.buffer)  # C++ refuses an unknown buffer, and names the others
        if size is not None and not 0 <= place.offset < size:
            raise _C.PlanError(
                f"offset {place.offset} is outside of {place.buffer}, which has {size} bytes"
            )

    def _aligned(self, place: Address, alignment: int, engine: str) -> None:
        self._address(place)
        known = self._alignment.get(place.buffer, WORKSPACE_ALIGNMENT) | place.offset
        if known & -known < alignment:
            raise _C.PlanError(
                f"offset {place.offset} in {place.buffer} is not known to be a multiple of the "
                f"{alignment} bytes that {engine} asks for"
            )

    def _tensor_map(self, described: TensorMap, kernel: str) -> None:
        """Checks the limits of cuTensorMapEncodeTiled, and that the tensor lies in its buffer."""

        def require(is_met: bool, what: str) -> None:
            if not is_met:
                raise _C.PlanError(f"{kernel}: of a tensor map, {what}")

        if described.element not in DTYPES_BY_NAME:
            return  # C++ refuses it, and names the others
        element = DTYPES_BY_NAME[described.element].itemsize
        shape, box, width = described.shape, described.box, described.swizzle_bytes
        require(1 <= len(shape) <= 5, "shape must have 1 to 5 dimensions")
        require(len(described.strides) == len(shape) - 1,
                "strides must have a dimension less than shape")  # fmt: skip
        require(len(box) == len(shape), "box must have as many dimensions as shape")
        require(width in (0, 32, 64, 128), "swizzle_bytes must be 0, 32, 64 or 128")
        require(all(1 <= size <= 2**32 for size in shape), "shape must be 1 to 2**32")
        require(all(1 <= size <= 256 for size in box), "box must be 1 to 256")
        require(all(one % 16 == 0 and 0 <= one < 2**40 for one in described.strides),
                "strides must be multiples of 16 bytes below 2**40")  # fmt: skip
        strides = (element, *described.strides)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        room = self._bytes.get(described.address.buffer, 0) - described.address.offset
        require(last + element <= room, "the tensor must lie in its buffer")
        require(box[0] * element % 16 == 0, "box must have rows of a multiple of 16 bytes")
        require(not width or box[0] * element <= width,
                "box must have rows of at most swizzle_bytes")  # fmt: skip
        self._aligned(described.address, 16, kernel)
