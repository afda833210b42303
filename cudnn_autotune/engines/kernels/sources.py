"""The CUDA sources of the kernels, as NVRTC takes them."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from importlib import resources

import torch

from cudnn_autotune.engines.activations import ACTIVATIONS, Activation

ELEMENTS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}
"""The name of each dtype in device.cuh."""
ACTIVATION_NUMBERS = {kind: number for number, kind in enumerate(ACTIVATIONS, 1)}
"""The number of each kind of activation in device.cuh; 0 is none."""
_VERSION_DIGITS = 8
_NAMED = re.compile(r'"(\w+\.cuh?)"')


@functools.cache
def source(*file_names: str) -> str:
    """Returns sources of this folder, one behind the other, with device.cuh before them; together
    they include nothing."""
    return "".join(map(text, ("device.cuh", *file_names)))


@functools.cache
def text(file_name: str, package: str = __package__) -> str:
    """Returns a source in a package's folder, with the name by which a compiler's messages call
    it."""
    return f'#line 1 "{file_name}"\n{_read(file_name, package)}'


def activation_macros(name: str) -> tuple[tuple[str, str | int], ...]:
    """Returns the macros that tell device.cuh an activation; ``""`` is none."""
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
    """Returns the names of the files that a kernel's source consists of; none for a user's."""
    return re.findall(r'^#line 1 "(.+)"$', source, re.MULTILINE)


@functools.cache
def _read(file_name: str, package: str) -> str:
    return (resources.files(package) / file_name).read_text(encoding="utf-8")


@functools.cache
def version_of(module: str, versions: tuple[str, ...] = ()) -> str:
    """Returns the version of an implementation: a digest of all files of the package whose change
    may change its results or what it offers.

    These are its module and the modules of the same folder that this imports, but for this one, and
    the sources that they name.

    Args:
        module: the module's ``__name__``.
        versions: those of other implementations that it runs.
    """
    package, _, name = module.rpartition(".")
    return digest(files_behind(f"{name}.py", package), versions)


def files_behind(file_name: str, package: str) -> set[tuple[str, str]]:
    """Returns the names and the packages of a module's file and of the files that it depends on
    (see :func:`version_of`)."""
    found: set[tuple[str, str]] = set()
    waiting = [file_name]
    while waiting:
        name = waiting.pop()
        if (name, package) in found:
            continue
        found.add((name, package))
        code = _read(name, package)
        found |= {(named, package) for named in _NAMED.findall(code)}
        if re.search(r"\bsource\(", code):
            found.add(("device.cuh", __package__))
        imported = re.findall(rf"^from {re.escape(package)}\.(\w+) import", code, re.MULTILINE)
        for names in re.findall(rf"^from {re.escape(package)} import (.+)$", code, re.MULTILINE):
            imported += names.split(", ")
        waiting += [f"{one}.py" for one in imported if one != "sources"]
    return found


def digest(files: Iterable[tuple[str, str]], versions: tuple[str, ...] = ()) -> str:
    """Returns the digest of files, given by their names and packages, and of versions."""
    parts = (*(_read(*file) for file in sorted(files)), *versions)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_VERSION_DIGITS]
