"""NVRTC, CUDA's compiler at run time. Its first use looks for it: loaded by torch, else beside
torch, else in the system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from cudnn_autotune.core.extension import _C

_FUNCTIONS = (
    "Version", "CreateProgram", "DestroyProgram", "CompileProgram", "GetProgramLogSize",
    "GetProgramLog", "GetCUBINSize", "GetCUBIN",
)  # fmt: skip


@cache
def version() -> tuple[int, int]:
    """Returns NVRTC's version, such as (13, 0).

    Raises:
        PlanError: NVRTC is not found.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking NVRTC")
    return major.value, minor.value


def compile_kernel(source: str, function: str, options: Sequence[str]) -> bytes:
    """Compiles CUDA C++ to a cubin. Other threads run Python meanwhile.

    Args:
        source: declares ``function`` as ``extern "C" __global__``.
        options: one of them is the architecture of a GPU (``--gpu-architecture=sm_90``).

    Raises:
        PlanError: it does not compile; the compiler's log is in the message.
    """
    library, what = _library(), f"compiling {function}"
    program = ctypes.c_void_p()
    handle = ctypes.byref(program)
    name = f"{function}.cu".encode()
    _check(library.nvrtcCreateProgram(handle, source.encode(), name, 0, None, None), what)
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), texts)
        if status:
            log = _text(program, "ProgramLog")[:-1].decode(errors="replace")
            _check(status, what, f"\n{log}" if log else "")
        cubin = _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(handle)
    # The name of the kernel's section, which ends with a NUL.
    if f".text.{function}\0".encode() not in cubin:
        raise _C.PlanError(
            f'{what}: the source has no extern "C" __global__ function of this name, or no option '
            "names an architecture such as sm_90"
        )
    return cubin


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    library = _library()
    if getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) or not size.value:
        return b""
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, text), f"reading NVRTC's {what}")
    return text.raw


def _check(status: int, what: str, log: str = "") -> None:
    if status:
        meaning = _library().nvrtcGetErrorString(status).decode()
        raise _C.PlanError(f"{what}: {meaning}{log}")


@cache
def _library() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    name = f"libnvrtc.so.{major}"
    wheels = Path(torch.__file__).parent.parent / "nvidia"
    # The folders of the wheels of CUDA 13 and of CUDA 12.
    folders = (wheels / f"cu{major}" / "lib", wheels / "cuda_nvrtc" / "lib")
    loaded = [(name, os.RTLD_NOW | os.RTLD_NOLOAD)]
    opened = [(str(folder / name), os.RTLD_NOW) for folder in folders] + [(name, os.RTLD_NOW)]
    why = ""
    for path, mode in loaded + opened:
        try:
            library = ctypes.CDLL(path, mode=mode)
        except OSError as error:
            why = str(error)
        else:
            break
    else:
        raise _C.PlanError(f"NVRTC is not there: {why}")
    for function in _FUNCTIONS:
        if not hasattr(library, f"nvrtc{function}"):
            raise _C.PlanError(f"NVRTC has no nvrtc{function}")
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library
