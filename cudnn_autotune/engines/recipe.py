"""Recipes: the launches of an implementation that is no engine of cuDNN.

A recipe is a sequence of launches into the tensors of the problem and a workspace. It is data, so
C++ runs it without Python (csrc/plan/recipe_plan.h), a CUDA graph can capture it, and tests run it
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cudnn_autotune.engines.problem import ConvProblem

Buffer = Literal["x", "w", "y", "bias", "residual", "slope", "workspace"]
"""The forward convolution's input, weight and output, its epilogue's operands, and the workspace.
fprop writes y, dgrad writes x and wgrad writes w."""
RESULTS: Mapping[str, Buffer] = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
WORKSPACE_ALIGNMENT = 256
"""Alignment of tensors in the workspace, in bytes; torch aligns the workspace itself so."""

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Address:
    """A place in device memory that is known at each launch."""

    buffer: Buffer
    """The forward's input ``"x"``, weight ``"w"`` or output ``"y"``, an operand of the epilogue, or
    the ``"workspace"``."""
    offset: int = 0
    """Bytes from the buffer's first element."""


@dataclass(frozen=True)
class Int64:
    """A 64-bit integer argument of a kernel."""

    value: int


@dataclass(frozen=True)
class TensorMap:
    """A descriptor for TMA's copies of boxes of a tensor, from compute capability 9.0 on. In the
    kernel it is a ``const __grid_constant__ CUtensorMap``.

    Dimensions, 1 to 5, come innermost first. A box's elements outside of the tensor are zero.
    """

    address: Address
    """The tensor's first element, at a multiple of 16 bytes."""
    element: Literal["float16", "bfloat16", "float32", "float64"]
    shape: tuple[int, ...]
    """Elements in each dimension."""
    strides: tuple[int, ...]
    """Bytes from an index to the next, in each dimension but the innermost: multiples of 16."""
    box: tuple[int, ...]
    """Elements of a box in each dimension, 1 to 256. Its rows have a multiple of 16 bytes."""
    swizzle_bytes: Literal[0, 32, 64, 128] = 0
    """Width in bytes of the swizzle of a box in shared memory; 0 for none."""


Argument = Address | int | Int64 | float | TensorMap
"""An argument of a kernel: a pointer, an ``int`` of 32 bits, a ``long long``, a ``float`` or a
``CUtensorMap``."""


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel, which NVRTC compiles for the GPU at hand."""

    source: str
    """CUDA C++. It includes nothing, and declares the function ``extern "C" __global__``."""
    function: str
    """The kernel's name in the source."""
    defines: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values for the compiler."""
    arch_suffix: Literal["", "a", "f"] = ""
    """Suffix of the architecture: ``a`` (``sm_90a``) for instructions of this architecture alone,
    as wgmma; ``f`` for its family."""


@dataclass(frozen=True)
class CompiledKernel:
    """A CUDA kernel that was compiled already, such as one of Triton's."""

    cubin: bytes
    """Machine code of this GPU."""
    function: str
    """The kernel's name in the machine code."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel."""

    kernel: Kernel | CompiledKernel
    grid: Dim3
    """Blocks in x, y and z."""
    block: Dim3
    """Threads of a block in x, y and z."""
    arguments: tuple[Argument, ...]
    """The kernel's arguments, in order."""
    shared_bytes: int = 0
    """Bytes of dynamic shared memory of a block."""
    cluster: Dim3 = (1, 1, 1)
    """Blocks of a cluster, 8 at most, which divides the grid. More than one needs compute
    capability 9.0 or later."""


@dataclass(frozen=True)
class EngineLaunch:
    """One launch of an engine of cuDNN, for a problem of its own."""

    problem: ConvProblem
    engine_text: str
    """The engine config, as ``Candidate.text``."""
    x: Address
    w: Address
    y: Address
    bias: Address | None = None
    residual: Address | None = None


@dataclass(frozen=True)
class PythonLaunch:
    """A call of a Python function that launches kernels on the current stream.

    It is called with tensors: x, w, y, then the bias, the residual and the slopes of a problem that
    has them, then the workspace (uint8). It needs the GIL, and about 10 us more a call than other
    launches.
    """

    function: Callable[..., None]


@dataclass(frozen=True)
class Recipe:
    """Launches, in their order on one stream."""

    launches: tuple[KernelLaunch | EngineLaunch | PythonLaunch, ...]
    workspace_bytes: int = 0
    """Bytes of the ``workspace`` buffer. Engines of cuDNN have their own workspace after it."""

    @property
    def kernels(self) -> list[Kernel] | None:
        """Returns the kernels that NVRTC compiles for it; None if it has other launches."""
        launched = [one.kernel for one in self.launches if isinstance(one, KernelLaunch)]
        if len(launched) < len(self.launches):
            return None
        return [kernel for kernel in launched if isinstance(kernel, Kernel)]


def workspace_room(size: int) -> int:
    """Returns the bytes of a tensor of ``size`` bytes in the workspace, up to the next tensor."""
    return -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
