"""Conversions of dataclasses into plain JSON and back. Fields at their default are left out."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cudnn_autotune.core.json_node import LARGEST_NUMBER, Node

T = TypeVar("T")

_DIGITS = 6


def encode(value: Any, digits: int = _DIGITS) -> Any:
    """Returns the value as dicts, lists, texts, bools, None and numbers of ``digits`` digits.

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
    """Inverts :func:`encode` for a dataclass ``kind``, whose floats are 0 or more.

    A field whose value is already an instance of its dataclass is taken as it is. A class's
    ``FORMER_FIELDS`` are ignored.

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


# The test for a value that needs no conversion and no check, as most: it saves the node.
_PLAIN: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: type(value) is str and value.isascii(),
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    float: lambda value: type(value) is float and 0 <= value <= LARGEST_NUMBER,
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
    types_of, needed, former = _fields_of(kind)
    if not isinstance(node.value, dict):
        raise node.error("an object")
    for name, item in node.value.items():
        if name not in types_of and name not in former:
            raise ValueError(f"{node.under(name, item).place}: is not a known field")
    for name in needed:
        if name not in node.value:
            raise ValueError(f"{node.place}.{name}: is missing")
    values = {}
    for name, item in node.value.items():
        if name in types_of:
            inner, is_plain = types_of[name]
            values[name] = item if is_plain(item) else _decode(inner, node.under(name, item))
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{node.place}: {error}") from error


_Fields = tuple[dict[str, tuple[Any, Callable[[Any], bool]]], tuple[str, ...], tuple[str, ...]]


@functools.cache
def _fields_of(kind: Any) -> _Fields:
    """Returns each field's type with the test for its plain values, the names of fields without a
    default, and the names of former fields."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    types_of = {field.name: (hints[field.name], _plain(hints[field.name])) for field in fields}
    needed = tuple(field.name for field in fields if _default(field) is dataclasses.MISSING)
    return types_of, needed, tuple(getattr(kind, "FORMER_FIELDS", ()))


def _plain(kind: Any) -> Callable[[Any], bool]:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in arguments:
        (inner,) = (a for a in arguments if a is not type(None))
        is_plain = _plain(inner)
        return lambda value: value is None or is_plain(value)
    return _PLAIN.get(kind, lambda value: False)
