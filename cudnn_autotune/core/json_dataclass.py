"""Turns dataclasses into plain JSON and back. Fields at their default are left out."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cudnn_autotune.core.json_node import Node

T = TypeVar("T")

_DIGITS = 6


def encode(value: Any, digits: int = _DIGITS) -> Any:
    """The value as dicts, lists, texts, bools, None and numbers of so many significant digits.

    Infinity and NaN become None. A number of 17 digits is exact.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: encode(item, digits)
            for f in dataclasses.fields(value)
            if (item := getattr(value, f.name)) != _default(f)
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def decode(kind: type[T], tree: Any, where: str = "") -> T:
    """The inverse of :func:`encode` for a dataclass ``kind``, whose floats are 0 or more.

    A field whose value is already an instance of its dataclass is taken as it is. What a class
    lists as ``FORMER_FIELDS`` is ignored.

    Raises:
        ValueError: a field is wrong; the message names it (after ``where``), what it must be and
            what it is.
    """
    return typing.cast(T, _decode(kind, Node(tree, where or kind.__name__)))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


_LEAVES: dict[Any, Callable[[Node], Any]] = {
    str: Node.text,
    bool: Node.boolean,
    int: lambda node: node.integer(-(2**63)),  # a seed may be negative
    float: Node.number,
}


def _decode(kind: Any, node: Node) -> Any:
    if kind is Any:
        return node.value
    if dataclasses.is_dataclass(kind):
        is_decoded = isinstance(kind, type) and isinstance(node.value, kind)
        return node.value if is_decoded else _decode_fields(kind, node)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if node.value is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return _decode(inner, node)
    if origin is typing.Literal:
        return node.one_of(arguments)
    if origin in (dict, Mapping):
        return {key: _decode(arguments[1], item) for key, item in node.object().items()}
    if origin in (list, tuple):
        return origin(_decode(arguments[0], item) for item in node.items())
    return _LEAVES[kind](node)


def _decode_fields(kind: Any, node: Node) -> Any:
    former = getattr(kind, "FORMER_FIELDS", ())
    given = {name: item for name, item in node.object().items() if name not in former}
    types_of = _types_of(kind)
    for name, item in given.items():
        if name not in types_of:
            raise ValueError(f"{item.place}: is not a known field")
    for field in dataclasses.fields(kind):
        if field.name not in given and _default(field) is dataclasses.MISSING:
            raise ValueError(f"{node.place}.{field.name}: is missing")
    values = {name: _decode(types_of[name], item) for name, item in given.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{node.place}: {error}") from error


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
