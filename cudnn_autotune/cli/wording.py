"""Problems, times and sizes as short texts that people read, and lines of them in a terminal, which
no text from a file can control."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
import torch

from cudnn_autotune.core.display import NONE, milliseconds, printable
from cudnn_autotune.engines.problem import DTYPES, ConvProblem
from cudnn_autotune.engines.roofline import Bound, Limit

_LAYOUTS = {1: ("ncw", "nwc"), 2: ("nchw", "nhwc"), 3: ("ncdhw", "ndhwc")}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BOUNDS: dict[Bound, str] = {
    "memory": "the bandwidth of the memory",
    "compute": "the rate of arithmetic",
    "launch": "the launch of a kernel",
}


def shapes(problem: ConvProblem) -> str:
    """The shapes, and the arguments that differ from the default: ``64×128×28×28, 128 of 3×3,
    padding 1``."""
    n = problem.spatial_dims
    x, w = problem.input_shape, problem.weight_shape
    parts = [_times(x), f"{w[0]} of {_times(w[2:])}"]
    before, after = problem.padding[:n], problem.padding[n:]
    if any(problem.padding):
        both = _each(before) if before == after else f"{_listed(before)}:{_listed(after)}"
        parts.append(f"padding {both}")
    if any(s != 1 for s in problem.stride):
        parts.append(f"stride {_each(problem.stride)}")
    if any(d != 1 for d in problem.dilation):
        parts.append(f"dilation {_each(problem.dilation)}")
    if problem.groups != 1:
        parts.append(f"groups {problem.groups}")
    return ", ".join(parts)


def layout(problem: ConvProblem) -> str:
    """The memory format: ``nchw``, ``nhwc``, or their like in one and three dimensions."""
    plain, last = _LAYOUTS[problem.spatial_dims]
    return plain if problem.memory_format == torch.contiguous_format else last


def dtype(problem: ConvProblem) -> str:
    return DTYPES[problem.dtype]


def conditions(problem: ConvProblem) -> str:
    """The flags that differ from the usual ones, as ``no TF32``; determinism is not among them."""
    parts = []
    if not problem.allow_tf32:
        parts.append("no TF32")
    if not problem.allow_reduced_precision:
        parts.append("no reduced precision")
    if problem.depthwise_kernel != "auto":
        parts.append(f"PyTorch's depthwise kernel: {problem.depthwise_kernel}")
    if problem.alignment != (32, 32, 32):
        parts.append(f"alignment {_listed(problem.alignment)}")
    if problem.pixel_strides is not None:
        parts.append(f"slices, pixels {_listed(problem.pixel_strides)} apart")
    return ", ".join(parts)


def bound(limit: Limit) -> str:
    """The words of a sentence for what binds a limit."""
    return _BOUNDS[limit.bound_by]


def interval(low_ms: float | None, high_ms: float | None) -> str:
    """An interval, as ``0.02886–0.02916``; empty if there is none."""
    if low_ms is None or high_ms is None:
        return ""
    return f"{milliseconds(low_ms)}–{milliseconds(high_ms)}"


def ratio(value: float | None, is_sure: bool = True) -> str:
    """A ratio, as ``1.05×``, or ``≈1.05×`` if it does not differ significantly from 1."""
    return NONE if value is None else f"{'' if is_sure else '≈'}{value:.2f}×"


def duration(ms: float) -> str:
    """The length of a search, as ``850 ms``, ``12.3 s`` or ``4 min 10 s``."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1e3:.1f} s"
    minutes, seconds = divmod(round(ms / 1e3), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: int) -> str:
    """A workspace's bytes, as ``0``, ``131 B`` or ``835 MiB``."""
    if not count:
        return "0"
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return (
        f"{value:.0f} {_UNITS[unit]}"
        if not unit or value >= 9.95
        else f"{value:.1f} {_UNITS[unit]}"
    )


def _times(values: Sequence[int]) -> str:
    return "×".join(map(str, values))


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _each(values: Sequence[int]) -> str:
    """One number if all values are alike, else a list."""
    return str(values[0]) if len(set(values)) == 1 else _listed(values)


def say(line: str, err: bool = False) -> None:
    """Prints a line, with a sign in the place of characters that do not print."""
    click.echo(printable(line), err=err)


@contextmanager
def warnings_held() -> Iterator[None]:
    """Holds warnings back until the block ends. If it raises an error, they are dropped: the error
    has to say what they would."""
    with warnings.catch_warnings(record=True) as held:
        warnings.simplefilter("always")
        yield
    for one in held:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
