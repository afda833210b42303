"""A problem as JSON and as one line of text, written and read without the extension."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from cudnn_autotune.core.json_node import Node, shown
from cudnn_autotune.engines.problem import (
    CHANNELS_LAST,
    DEPTHWISE_KERNELS,
    DTYPES,
    DTYPES_BY_NAME,
    OPERATIONS,
    ConvProblem,
)

_MEMORY_FORMATS = ("contiguous", "channels_last")
_LISTS = ("input_shape", "weight_shape", "stride", "padding", "dilation", "alignment")
_FLAGS = ("deterministic", "allow_tf32", "allow_reduced_precision")
_DEPTHWISE, _SLICES = "depthwise_kernel", "pixel_strides"
_EPILOGUE = ("bias", "residual", "activation")
_FULL_ALIGNMENT = (32, 32, 32)


def problem_to_json(problem: ConvProblem) -> dict[str, Any]:
    """Returns a tree of texts, numbers, flags and lists, which :func:`problem_from_json` reads."""
    return {
        "op": problem.op,
        "input_shape": list(problem.input_shape),
        "weight_shape": list(problem.weight_shape),
        "stride": list(problem.stride),
        "padding": list(problem.padding),
        "dilation": list(problem.dilation),
        "groups": problem.groups,
        "dtype": DTYPES[problem.dtype],
        "memory_format": _memory_format(problem),
        "deterministic": problem.deterministic,
        "allow_tf32": problem.allow_tf32,
        "allow_reduced_precision": problem.allow_reduced_precision,
        "alignment": list(problem.alignment),
        **_rare_to_json(problem),
    }


def _rare_to_json(problem: ConvProblem) -> dict[str, Any]:
    """Returns the fields that few problems have. Other problems' JSON is as it was before them."""
    names = _EPILOGUE if problem.is_fused else ()
    if problem.depthwise_kernel != "auto":
        names = (_DEPTHWISE, *names)
    rare = {name: getattr(problem, name) for name in names}
    if problem.pixel_strides is not None:
        rare[_SLICES] = list(problem.pixel_strides)
    return rare


def problem_from_json(tree: Any, place: str = "problem") -> ConvProblem:
    """Reads a problem; raises ValueError naming the place and what is allowed there."""
    node = Node(tree, place)
    given = set(tree) if isinstance(tree, dict) else set()
    is_fused = not given.isdisjoint(_EPILOGUE)
    rare = (*given.intersection([_DEPTHWISE, _SLICES]), *(_EPILOGUE if is_fused else ()))
    fields = node.fields("op", *_LISTS, "groups", "dtype", "memory_format", *_FLAGS, *rare)
    values: dict[str, Any] = {
        name: tuple(item.integer() for item in fields[name].items()) for name in _LISTS
    }
    values.update({name: fields[name].boolean() for name in _FLAGS})
    if _DEPTHWISE in fields:
        values[_DEPTHWISE] = fields[_DEPTHWISE].one_of(DEPTHWISE_KERNELS)
    if _SLICES in fields:
        values[_SLICES] = tuple(item.integer() for item in fields[_SLICES].items())
    if is_fused:
        values["bias"] = fields["bias"].boolean()
        values["residual"] = fields["residual"].boolean()
        values["activation"] = fields["activation"].text()
    values["op"] = fields["op"].one_of(OPERATIONS)
    values["groups"] = fields["groups"].integer(1)
    values["dtype"] = DTYPES_BY_NAME[fields["dtype"].one_of(tuple(DTYPES_BY_NAME))]
    values["memory_format"] = torch.contiguous_format
    if fields["memory_format"].one_of(_MEMORY_FORMATS) == "channels_last":
        dims = len(values["input_shape"]) - 2
        if dims not in CHANNELS_LAST:
            raise fields["memory_format"].error(f"contiguous with {dims} spatial dimension(s)")
        values["memory_format"] = CHANNELS_LAST[dims]
    try:
        return ConvProblem(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error


def problem_text(problem: ConvProblem) -> str:
    """Returns the problem in one line. Different problems have different texts; ``deterministic``
    is not in the text.

    If the problem is not ``deterministic``, it is ``problem.text``, which the extension writes.
    """
    n = problem.spatial_dims
    before, after = problem.padding[:n], problem.padding[n:]
    words = [
        problem.op,
        f"x={_joined(problem.input_shape, 'x')}",
        f"w={_joined(problem.weight_shape, 'x')}",
        f"padding={_joined(before)}" + (f":{_joined(after)}" if after != before else ""),
        f"stride={_joined(problem.stride)}",
        f"dilation={_joined(problem.dilation)}",
        f"groups={problem.groups}",
        DTYPES[problem.dtype],
        _memory_format(problem),
    ]
    if not problem.allow_tf32:
        words.append("no_tf32")
    if not problem.allow_reduced_precision:
        words.append("no_reduced_precision")
    if problem.depthwise_kernel != "auto":
        words.append(f"{_DEPTHWISE}={problem.depthwise_kernel}")
    if problem.alignment != _FULL_ALIGNMENT:
        words.append(f"alignment={_joined(problem.alignment)}")
    if problem.pixel_strides is not None:
        words.append(f"{_SLICES}={_joined(problem.pixel_strides)}")
    if problem.bias:
        words.append("bias")
    if problem.residual:
        words.append("residual")
    if problem.activation:
        words.append(problem.activation)
    return " ".join(words)


_INTS = r"(\d{1,19}(?:,\d{1,19})*)"
_SHAPE = r"(\d{1,19}(?:x\d{1,19})*)"
_TEXT = re.compile(
    rf"(\S+) x={_SHAPE} w={_SHAPE} padding={_INTS}(?::{_INTS})? stride={_INTS} dilation={_INTS} "
    rf"groups=(\d{{1,19}}) (\S+) (\S+)( no_tf32)?( no_reduced_precision)?"
    rf"(?: {_DEPTHWISE}=(cudnn|native))?(?: alignment={_INTS})?"
    rf"(?: {_SLICES}={_INTS})?"
    rf"( bias)?( residual)?(?: ([\w().]+))?",
    re.ASCII,
)


def problem_from_text(text: str, deterministic: bool = False) -> ConvProblem:
    """Reads a text of :func:`problem_text`; raises ValueError if it is none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is no problem's text")
    op, x, w, before, after, stride, dilation, groups, dtype, layout, *rest = match.groups()
    *flags, depthwise_kernel, alignment, slices, bias, residual, activation = rest
    pixel_strides: Any = _ints(slices) if slices else None
    kernel: Any = depthwise_kernel or "auto"
    shape = _ints(x, "x")
    if op not in OPERATIONS or dtype not in DTYPES_BY_NAME or layout not in _MEMORY_FORMATS:
        raise ValueError(f"{shown(text)} is no problem's text")
    is_plain = layout == _MEMORY_FORMATS[0]
    try:
        return ConvProblem(
            op=op,
            input_shape=shape,
            weight_shape=_ints(w, "x"),
            stride=_ints(stride),
            padding=_ints(before) + _ints(after or before),
            dilation=_ints(dilation),
            groups=int(groups),
            dtype=DTYPES_BY_NAME[dtype],
            memory_format=torch.contiguous_format if is_plain else CHANNELS_LAST[len(shape) - 2],
            deterministic=deterministic,
            allow_tf32=not flags[0],
            allow_reduced_precision=not flags[1],
            depthwise_kernel=kernel,
            alignment=_ints(alignment) if alignment else _FULL_ALIGNMENT,  # type: ignore[arg-type]
            bias=bool(bias),
            residual=bool(residual),
            activation=activation or "",
            pixel_strides=pixel_strides,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{shown(text)} is no problem's text") from error


def _ints(text: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(map(int, text.split(separator)))


def _joined(values: Iterable[int], separator: str = ",") -> str:
    return separator.join(map(str, values))


def _memory_format(problem: ConvProblem) -> str:
    is_plain = problem.memory_format == torch.contiguous_format
    return "contiguous" if is_plain else "channels_last"
