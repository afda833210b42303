"""Dataclasses to plain JSON and back, strictly. Fields at their default are left out."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_DIGITS = 6


def encode(value: Any) -> Any:
    """A tree of dicts, lists, texts, bools, None and finite numbers of 6 significant digits.

    Infinity and NaN become None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: encode(item)
            for f in dataclasses.fields(value)
            if (item := getattr(value, f.name)) != _default(f)
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def decode(kind: type[T], tree: Any, where: str = "") -> T:
    """The inverse of :func:`encode` for a dataclass ``kind``.

    Raises:
        ValueError: naming the field (``where`` goes before it), what it must be and what it is.
    """
    return typing.cast(T, _decode(kind, tree, where or kind.__name__))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _wrong(where: str, expected: str, tree: Any) -> ValueError:
    told = repr(tree)
    return ValueError(f"{where}: expected {expected}, got {told[:60]}{'…' * (len(told) > 60)}")


def _decode(kind: Any, tree: Any, where: str) -> Any:
    if kind is Any:
        return tree
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, tree, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if tree is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return _decode(inner, tree, where)
    if origin is typing.Literal:
        if tree not in arguments:
            raise _wrong(where, f"one of {', '.join(map(repr, arguments))}", tree)
        return tree
    if origin is dict:
        if not isinstance(tree, dict):
            raise _wrong(where, "an object", tree)
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in tree.items()}
    if origin in (list, tuple):
        if not isinstance(tree, list):
            raise _wrong(where, "a list", tree)
        items = (_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(tree))
        return origin(items)
    if kind is float:
        if isinstance(tree, bool) or not isinstance(tree, (int, float)) or not math.isfinite(tree):
            raise _wrong(where, "a finite number", tree)
        return float(tree)
    if not isinstance(tree, kind) or (kind is int and isinstance(tree, bool)):
        raise _wrong(where, {str: "a text", int: "a whole number"}.get(kind, kind.__name__), tree)
    return tree


def _decode_fields(kind: Any, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise _wrong(where, "an object", tree)
    types_of = _types_of(kind)
    if unknown := sorted(tree.keys() - types_of.keys()):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    for field in dataclasses.fields(kind):
        if field.name not in tree and _default(field) is dataclasses.MISSING:
            raise ValueError(f"{where}: field {field.name!r} is missing")
    return kind(
        **{name: _decode(types_of[name], item, f"{where}.{name}") for name, item in tree.items()}
    )


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
