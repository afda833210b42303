"""The CUDA sources of the kernels for NVRTC, and the implementations' versions."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from importlib import resources

import torch

from cudnn_autotune.engines.activations import ACTIVATIONS, Activation

ELEMENTS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}
"""The name of each dtype in device.cuh."""
ACTIVATION_NUMBERS = {kind: number for number, kind in enumerate(ACTIVATIONS, 1)}
"""The number of each kind of activation in device.cuh; 0 is none."""
_VERSION_DIGITS = 8
_PACKAGE, _, _KERNELS = __package__.rpartition(".")
_FOLDER = resources.files(_PACKAGE)
_NAMED = re.compile(r'"(\w+\.cuh?)"')


@functools.cache
def source(package: str, *file_names: str) -> str:
    """Returns sources of a package's folder, one behind the other, with device.cuh before them.
    They need no includes."""
    return text(__package__, "device.cuh") + "".join(text(package, name) for name in file_names)


@functools.cache
def text(package: str, file_name: str) -> str:
    """Returns a source in a package's folder, with its name for a compiler's messages."""
    return f'#line 1 "{file_name}"\n{_read(f"{_place(package)}/{file_name}")}'


def activation_macros(name: str) -> tuple[tuple[str, str | int], ...]:
    """Returns device.cuh's macros for an activation; ``""`` is none."""
    if name == "":
        return (("ACTIVATION", 0),)
    activation = Activation.named(name)
    macros: tuple[tuple[str, str | int], ...] = (
        ("ACTIVATION", ACTIVATION_NUMBERS[activation.kind]),
    )
    if activation.parameter is not None:
        macros += (("ACTIVATION_PARAMETER", f"{activation.parameter!r}f"),)
    return macros


def files_of(source: str) -> list[str]:
    """Returns the names of a kernel's source's files; none for a user's."""
    return re.findall(r'^#line 1 "(.+)"$', source, re.MULTILINE)


def version_of(module: str) -> str:
    """Returns the version of an implementation: a digest of all files of the package that may
    change its results or offers (see :func:`files_behind`).

    Args:
        module: the module's ``__name__``.
    """
    parts = "\0".join(map(_read, sorted(files_behind(module))))
    return hashlib.sha256(parts.encode()).hexdigest()[:_VERSION_DIGITS]


def files_behind(module: str) -> set[str]:
    """Returns the files behind an implementation, as paths below the package.

    These are its module, and the modules of this room and of its own that it imports, directly or
    not, without this one. The sources that these name, in their folders, are among them.
    """
    found: set[str] = set()
    waiting = [f"{_place(module)}.py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _files_of_module(path) if path.endswith(".py") else ()
    return found


@functools.cache
def _files_of_module(path: str) -> tuple[str, ...]:
    """Returns the files that a module itself imports or names."""
    code, folder = _read(path), path.rpartition("/")[0]
    rooms = {_KERNELS, path.partition("/")[0]}
    found = [f"{folder}/{name}" for name in _NAMED.findall(code)]
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        modules = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        places = [f"{_place(module)}.py" for module in modules if module]
        own = [place for place in places if place.partition("/")[0] in rooms]
        found += [place for place in own if (_FOLDER / place).is_file()]
    this_module = f"{_place(__name__)}.py"
    if this_module in found and re.search(r"\bsource\(", code):
        found.append(f"{_KERNELS}/device.cuh")
    return tuple(one for one in found if one != this_module)


def _place(module: str) -> str:
    """Returns the path of a module or a package below this package."""
    return module.removeprefix(f"{_PACKAGE}.").replace(".", "/")


@functools.cache
def _read(path: str) -> str:
    return (_FOLDER / path).read_text(encoding="utf-8")
