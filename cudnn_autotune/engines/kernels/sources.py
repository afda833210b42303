"""The CUDA sources of the kernels, as NVRTC takes them."""

from __future__ import annotations

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


def _read(file_name: str, package: str) -> str:
    return (resources.files(package) / file_name).read_text(encoding="utf-8")


@functools.cache
def version_of(*file_names: str, package: str = __package__, versions: tuple[str, ...] = ()) -> str:
    """Returns a digest of files of a package's folder: the version of an implementation. They are
    all whose change may change its results or what it offers: its sources, its module, and what
    that imports from the folder, but for this module. ``versions`` are those of other
    implementations that it runs."""
    texts = (_read(name, package) for name in sorted(file_names))
    parts = (*texts, *versions)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_VERSION_DIGITS]
