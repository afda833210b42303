"""Runs recipes on a CPU: the real sources of the kernels, compiled by the host's C++ compiler.

Engines of cuDNN are replaced by PyTorch's convolution.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import (
    Address,
    Argument,
    EngineLaunch,
    Int64,
    Kernel,
    KernelLaunch,
    PythonLaunch,
    Recipe,
)
from cudnn_autotune.timers.measuring import ADDED
from support.conv.references import reference, with_epilogue

HEADER = Path(__file__).parent / "emulation.h"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or ""
WHY_NOT = (
    ""
    if COMPILER and platform.machine() == "x86_64"
    else "the emulation of CUDA needs g++ and a CPU of x86-64"
)

Buffers = Mapping[str, Tensor]


class EmulationError(RuntimeError):
    """A kernel did what CUDA leaves undefined."""


@dataclass
class Work:
    """What kernels have done since the counts were set to zero."""

    matrices: int = 0
    """8 x 8 matrices loaded from shared memory."""
    conflicts: int = 0
    """Accesses more that were needed because rows lay in the same banks."""
    products: int = 0
    """Products of matrices, 8 columns of a warp each."""
    numbers: int = 0
    """Numbers in float16 that threads have converted to multiply them one by one."""


WORK = Work()

_MAIN = """
extern "C" const char* emulate(int arguments, const unsigned* grid, const unsigned* block,
                               unsigned shared_bytes, void** addresses, int reversed,
                               unsigned resident, unsigned seed, unsigned first_block) {
  return emulation::run<&%s>(&%s, arguments, grid, block, shared_bytes, addresses, reversed != 0,
                             resident, seed, first_block);
}
"""
# _Float16 needs no more than SSE2; F16C converts in one instruction where there is one.
_OPTIONS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-mf16c", "-w")
# Without -fsanitize the linker does not ask for the sanitizer's library, whose one function that is
# called emulation.cpp has.
_CHECKED = (*_OPTIONS, "-fsanitize=alignment", "-fsanitize-recover=alignment")
# gold links a kernel in a fifth of the time.
_LINKED = ("-shared", "-Wl,-z,defs", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []))


@functools.cache
def _folder() -> Path:
    """The compiled kernels of this user, which later runs of the tests find again."""
    folder = Path(tempfile.gettempdir()) / f"cuda_emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        folder = Path(tempfile.mkdtemp())
    return folder


def _built(suffix: str, source: str, command: Sequence[str]) -> Path:
    """The file that a command makes of a C++ source, once for all processes.

    The command's ``IN`` and ``OUT`` are the names of the source and of the file.
    """
    parts = (COMPILER, *command, HEADER.read_text("utf-8"), source)
    target = _folder() / (hashlib.sha256("\0".join(parts).encode()).hexdigest() + suffix)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            (Path(scratch) / "source.cpp").write_text(source, encoding="utf-8")
            names = {"IN": f"{scratch}/source.cpp", "OUT": f"{scratch}/out"}
            given = [COMPILER, *(names.get(word, word) for word in command)]
            done = subprocess.run(given, capture_output=True, text=True)
            if done.returncode:
                raise EmulationError(f"does not compile: {done.stderr[:4000]}")
            os.replace(names["OUT"], target)
    return target


@functools.cache
def _runtime() -> Path:
    source = (HEADER.parent / "emulation.cpp").read_text(encoding="utf-8")
    return _built(".o", source, [*_OPTIONS, f"-I{HEADER.parent}", "-c", "IN", "-o", "OUT"])


@functools.lru_cache(maxsize=512)
def compiled(kernel: Kernel) -> ctypes.CDLL:
    """Compiles a kernel for this CPU, once for all processes."""
    defines = "".join(f"#define {name} {value}\n" for name, value in kernel.defines)
    header = f'#include "{HEADER}"\n'
    source = header + defines + kernel.source + _MAIN % (kernel.function, kernel.function)
    kernel_object = _built(".o", source, [*_CHECKED, "-c", "IN", "-o", "OUT"])
    objects = [str(kernel_object), str(_runtime())]
    target = _built(".so", "", [*_LINKED, *objects, "-o", "OUT"])
    library = ctypes.CDLL(str(target))
    library.emulate.restype = ctypes.c_char_p
    return library


def _value(argument: Argument, buffers: Buffers) -> ctypes._SimpleCData:
    if isinstance(argument, Address):
        return ctypes.c_void_p(buffers[argument.buffer].data_ptr() + argument.offset)
    if isinstance(argument, Int64):
        return ctypes.c_longlong(argument.value)
    if isinstance(argument, int):
        assert -(2**31) <= argument < 2**31, argument
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)


def launch_kernel(
    launch: KernelLaunch,
    buffers: Buffers,
    *,
    is_reversed: bool = False,
    resident: int = 1,
    seed: int = 0,
    first_block: int = 0,
) -> None:
    """Runs one launch. The buffers are dense; their data begins at the tensor's first element.

    Args:
        resident: The blocks that are there together. Others start when one of them ends.
        seed: Of the order in which blocks start and take turns. 0 for the order of their indices.
        first_block: The first block that runs; those before it are left out.

    Raises:
        EmulationError: the kernel does not compile, or does what CUDA leaves undefined.
    """
    assert isinstance(launch.kernel, Kernel)
    library = compiled(launch.kernel)
    values = [_value(argument, buffers) for argument in launch.arguments]
    addresses = (ctypes.c_void_p * max(1, len(values)))(
        *(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values)
    )
    dim3 = ctypes.c_uint * 3
    error = library.emulate(
        len(values),
        dim3(*launch.grid),
        dim3(*launch.block),
        launch.shared_bytes,
        addresses,
        int(is_reversed),
        resident,
        seed,
        ctypes.c_uint(first_block),
    )
    counts = (ctypes.c_longlong * 4)()
    library.work(counts)
    WORK.matrices += counts[0]
    WORK.conflicts += counts[1]
    WORK.products += counts[2]
    WORK.numbers += counts[3]
    if error:
        raise EmulationError(error.decode())


def _view(buffers: Buffers, address: Address, shape: Sequence[int], problem: ConvProblem) -> Tensor:
    """The dense tensor at an address, in the problem's dtype and layout."""
    buffer = buffers[address.buffer]
    whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
    begin = buffer.storage_offset() * buffer.element_size() + address.offset
    strides = (
        torch.empty(tuple(shape), device="meta")
        .contiguous(memory_format=problem.memory_format)
        .stride()
    )
    count = torch.Size(shape).numel()
    size = problem.dtype.itemsize
    assert begin % size == 0
    assert begin + count * size <= whole.numel(), "an engine's tensor lies outside of its buffer"
    typed = whole[begin : begin + count * size].view(problem.dtype)
    return typed.as_strided(tuple(shape), strides)


def _launch_engine(launch: EngineLaunch, buffers: Buffers) -> None:
    problem = launch.problem
    addresses = (launch.x, launch.w, launch.y)
    for address, alignment in zip(addresses, problem.alignment, strict=True):
        place = buffers[address.buffer].data_ptr() + address.offset
        assert place % alignment == 0, "an engine's tensor is less aligned than its problem says"
    x = _view(buffers, launch.x, problem.input_shape, problem)
    w = _view(buffers, launch.w, problem.weight_shape, problem)
    y = _view(buffers, launch.y, problem.output_shape, problem)
    a, b, result = {"fprop": (x, w, y), "dgrad": (y, w, x), "wgrad": (y, x, w)}[problem.op]
    found = reference(problem, a, b)
    bias = residual = None
    if problem.bias:
        assert launch.bias is not None
        channels = (1, problem.weight_shape[0], *(1,) * problem.spatial_dims)
        bias = _view(buffers, launch.bias, channels, problem).flatten()
    if problem.residual:
        assert launch.residual is not None
        residual = _view(buffers, launch.residual, problem.output_shape, problem)
    result.copy_(with_epilogue(problem, found, bias, residual))


def run_recipe(recipe: Recipe, buffers: Buffers, *, is_reversed: bool = False) -> None:
    """Runs a recipe's launches into ``buffers``, which has every buffer that it names."""
    for launch in recipe.launches:
        if isinstance(launch, KernelLaunch):
            launch_kernel(launch, buffers, is_reversed=is_reversed)
        elif isinstance(launch, PythonLaunch):
            names = ("x", "w", "y", *ADDED, "workspace")
            launch.function(*(buffers[name] for name in names if name in buffers))
        else:
            assert isinstance(launch, EngineLaunch)
            _launch_engine(launch, buffers)
