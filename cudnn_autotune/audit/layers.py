"""Layer lists name the convolutions of an audit.

A list is a JSON file, ``{"about": text, "layers": [layer, ...]}``, each layer an object with

- ``name``: letters, digits and ``_ . -``;
- ``source``: a text that says where the layer is from;
- ``input_shape``, ``weight_shape``: of the forward convolution, ``[N, C, *spatial]`` and
  ``[K, C / groups, *kernel]``;
- ``stride``, ``padding``, ``dilation``: an int, or a list with one entry per spatial dimension
  (default 1, 0, 1); ``groups`` (default 1);
- ``dtype`` (default ``"float16"``) and ``also``, a list of further dtypes;
- ``channels_last`` (default true);
- ``ops``: which of ``fprop``, ``dgrad`` and ``wgrad`` (default all).

Only ``name`` and the two shapes are required. A layer is one case in each op and dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from cudnn_autotune.expert import (
    CHANNELS_LAST,
    DTYPES_BY_NAME,
    OPERATIONS,
    ConvProblem,
    Operation,
)
from cudnn_autotune.tools import cut, decode, read_json, shown

__all__ = ["Case", "load", "select"]

_DEFAULT = resources.files(__package__) / "layers_default.json"
# This is enough for some thousand layers.
_MOST_BYTES = 2**18
_LAYOUTS = {1: ("ncw", "nwc"), 2: ("nchw", "nhwc"), 3: ("ncdhw", "ndhwc")}


@dataclass(frozen=True)
class _Layer:
    """An entry of a layer list. What is not checked here, ``Case`` checks."""

    name: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    source: str = ""
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    dtype: str = "float16"
    also: tuple[str, ...] = ()
    channels_last: bool = True
    ops: tuple[Operation, ...] = OPERATIONS

    def __post_init__(self) -> None:
        if re.fullmatch(r"[\w.-]{1,200}", self.name, re.ASCII) is None:
            raise ValueError(
                f"name must be 1 to 200 letters, digits or any of _ . -, got {shown(self.name)}"
            )
        for field, values in (("also", (self.dtype, *self.also)), ("ops", self.ops)):
            if not values or len(set(values)) < len(values):
                raise ValueError(
                    f"{field} must name something, and nothing twice, got {shown(values)}"
                )

    def cases(self) -> Iterator[Case]:
        names = {field.name for field in fields(Case)}
        shared = {k: v for k, v in vars(self).items() if k in names and k != "dtype"}
        for dtype in (self.dtype, *self.also):
            for op in self.ops:
                yield Case(layer=self.name, op=op, dtype=dtype, **shared)


@dataclass(frozen=True)
class Case:
    """A layer in one direction and dtype; the fields are those of a layer list.

    Lists become tuples, so that a case comes back equal from ``dataclasses.asdict`` and JSON.

    Raises:
        ValueError: this is no :class:`~cudnn_autotune.ConvProblem`; the message names the field.
    """

    layer: str
    op: Operation
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    dtype: str = "float16"
    channels_last: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("input_shape", "weight_shape", "stride", "padding", "dilation"):
            value = getattr(self, field)
            if isinstance(value, list):
                object.__setattr__(self, field, tuple(value))
        if self.dtype not in DTYPES_BY_NAME:
            allowed = ", ".join(DTYPES_BY_NAME)
            raise ValueError(f"dtype must be one of {allowed}, got {shown(self.dtype)}")
        spatial = len(self.input_shape) - 2
        if self.channels_last and spatial == 1:
            raise ValueError("channels_last must be false with one spatial dimension")
        if isinstance(self.padding, tuple) and len(self.padding) != spatial:
            # ConvProblem takes a padding for each end; PyTorch's convolution does not.
            raise ValueError(f"padding must be {spatial} int(s), got {shown(self.padding)}")
        self.problem()

    @property
    def id(self) -> str:
        """The case's name in records, as ``resnet50_layer1_3x3/dgrad/float16/nhwc``."""
        layout = _LAYOUTS[len(self.input_shape) - 2][self.channels_last]
        return f"{self.layer}/{self.op}/{self.dtype}/{layout}"

    def problem(self) -> ConvProblem:
        """Returns the convolution, with TF32 allowed.

        Tensors of one pixel are the same in either memory format; torch calls them contiguous.
        """
        is_of_pixels = math.prod(self.input_shape[2:]) == math.prod(self.weight_shape[2:]) == 1
        formats = CHANNELS_LAST if self.channels_last and not is_of_pixels else {}
        return ConvProblem(
            op=self.op,
            input_shape=self.input_shape,
            weight_shape=self.weight_shape,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            dtype=DTYPES_BY_NAME[self.dtype],
            memory_format=formats.get(len(self.input_shape) - 2, torch.contiguous_format),
            allow_tf32=True,
        )


def load(path: str | PathLike[str] | None = None) -> list[Case]:
    """Reads the cases of a layer list in their order; None means the list that the package ships.
    Raises ValueError that names the file, the layer and the field at fault."""
    file = _DEFAULT if path is None else Path(path)
    try:
        data = read_json(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable JSON file: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise ValueError(f'{file}: must be an object with "layers", a list')
    cases: dict[str, Case] = {}
    for number, layer in enumerate(data["layers"], start=1):
        name = layer.get("name") if isinstance(layer, dict) else None
        where = f"{file}: layer {number}" + (f" ({cut(name)})" if isinstance(name, str) else "")
        try:
            for case in decode(_Layer, layer, "layer").cases():
                if (id := case.id) in cases:
                    raise ValueError(f"name: {id} is there already")
                cases[id] = case
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not cases:
        raise ValueError(f"{file}: layers must not be empty")
    return list(cases.values())


def select(
    cases: Iterable[Case],
    pattern: str | None = None,
    share: tuple[int, int] = (1, 1),
) -> list[Case]:
    """Returns a part of the cases, in a pseudo-random order that depends on them alone, so that a
    run that is cut short has seen a random sample.

    Args:
        pattern: comma-separated texts; only cases whose id contains one of them are taken.
        share: ``(i, n)`` with 1 <= i <= n takes an n-th of the cases at random. The n shares are
            disjoint and together complete; one may be empty.

    Raises:
        ValueError: the pattern fits no case.
    """
    part, parts = share
    chosen = list(cases)
    if pattern is not None:
        texts = [text.strip() for text in pattern.split(",") if text.strip()]
        chosen = [case for case in chosen if any(text in case.id for text in texts)]
        if not chosen:
            raise ValueError(
                f"pattern must be comma-separated parts of case ids (layer/op/dtype/layout); none "
                f"of the cases has any of {shown(pattern)}"
            )
    # Shares are those of the records in benchmarks/results, which had a seed of 0.
    chosen.sort(key=lambda case: sha256(f"0/{case.id}".encode()).digest())
    return chosen[part - 1 :: parts]
