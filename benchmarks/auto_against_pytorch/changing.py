"""Layers and norms whose sizes keep changing: the service of new sizes against PyTorch's own
path."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from common import numbers

from . import norms
from .layers import OPS, Layer
from .measure import call_of, measure, served
from .norms import Norm

# A size slower than this is measured once more before it counts.
_WORSE = 1 / 1.05
_MOST_BYTES = 4e8  # of the tensors of a call
# Input channels, output channels, edge of the filter, groups, number of spatial dimensions.
_KINDS = (
    (64, 64, 3, 1, 2),
    (3, 64, 7, 1, 2),
    (128, 128, 3, 32, 2),
    (96, 96, 7, 96, 2),
    (256, 64, 1, 1, 2),
    (32, 8, 3, 1, 2),
    (128, 128, 3, 1, 1),
    (32, 32, 3, 1, 3),
)
_DRY_KINDS = ((4, 4, 3, 1, 2),)

_Any = TypeVar("_Any", Layer, Norm)


def layers(op: str, is_dry: bool) -> dict[str, Any]:
    """By name; their sizes are those that :func:`row` measures first. The two-dimensional ones are
    there in both layouts."""
    if op not in OPS:
        return norms.layers(op, is_dry)
    found = {}
    for channels, filters, edge, groups, dims in _DRY_KINDS if is_dry else _KINDS:
        for last in (True, False) if dims == 2 else (dims == 3,):
            size = (2, *(8,) * dims) if is_dry else (8, *(64, 72, 80)[:dims])
            if dims == 3 and not is_dry:
                size = (2, 24, 32, 32)
            if dims == 1:
                size = (8, 4000)
            name = f"{dims}-d {channels}x{filters} {edge} groups {groups}"
            found[f"{name} {'last' if last else 'first'}"] = Layer(
                kind="changing",
                op=op,
                dtype="float32" if is_dry else "float16",
                channels_last=last,
                input_shape=(size[0], channels, *size[1:]),
                weight_shape=(filters, channels // groups, *(edge,) * dims),
                stride=(1,) * dims,
                padding=(edge // 2,) * dims,
                dilation=(1,) * dims,
                groups=groups,
                transposed=False,
            )
    return found


def _sized(layer: _Any, size: tuple[int, ...]) -> _Any:
    return replace(layer, input_shape=(size[0], layer.input_shape[1], *size[1:]))


def _near(layer: _Any, source: random.Random) -> tuple[int, ...]:
    """A size within a factor of two of the layer's own, of the same batch size."""
    batch, _, *sizes = layer.input_shape
    return (batch, *(source.randint(size, 2 * size) for size in sizes))


def _far(layer: _Any, source: random.Random) -> tuple[int, ...]:
    """Any size, that of the batch too."""
    batch, _, *sizes = layer.input_shape
    factors = [2 ** source.uniform(-3, 2), *(2 ** source.uniform(-4, 2.5) for _ in sizes)]
    drawn = [round(a * b) for a, b in zip((batch, *sizes), factors, strict=True)]
    return tuple(max(1, size) for size in drawn)


def measured_sizes(layer: _Any, count: int, source: random.Random) -> Iterator[_Any]:
    """The layer's own size, and others near it."""
    yield layer
    for _ in range(count - 1):
        yield _sized(layer, _near(layer, source))


def new_sizes(layer: _Any, count: int, source: random.Random) -> Iterator[_Any]:
    """Near and far sizes by turns."""
    for index in range(count):
        found = _sized(layer, (_far if index % 2 else _near)(layer, source))
        while found.bytes > _MOST_BYTES or (isinstance(found, Norm) and not found.is_defined):
            found = _sized(layer, _far(layer, source))
        yield found


def _served_by(known: int) -> str:
    """Returns the kind of service of the last new size of a convolution: a key of ``kinds`` of
    :func:`row`.

    Args:
        known: number of choices before it came.
    """
    import cudnn_autotune as ca

    made = ca.choices()[known:]
    if made and made[-1].origin != "neighbour":
        return "searched"
    return "own path" if not made or made[-1].text == "aten" else "neighbour"


def row(layer: Any, measured: int, count: int, device: str, seed: int = 0) -> dict[str, Any]:
    """The row of a layer that has met ``measured`` near sizes before ``count`` new ones come."""
    import cudnn_autotune as ca

    ca.forget()
    is_norm = isinstance(layer, Norm)
    source = random.Random(seed)
    begin = time.perf_counter()
    with served("auto"):
        for early in measured_sizes(layer, measured, source):
            (norms.step_of if is_norm else call_of)(early, device)()
    searching_s = time.perf_counter() - begin
    texts, ours, pytorchs, ratios = [], 0.0, 0.0, []
    kinds = dict.fromkeys(("neighbour", "own path", "searched"), 0)
    begin = time.perf_counter()
    for one in new_sizes(layer, count, source):
        known = len(ca.norm_choices() if is_norm else ca.choices())
        found = (norms.measure if is_norm else measure)(one, device, _WORSE)
        kind = (norms.served_by if is_norm else _served_by)(known)
        kinds[kind] += 1
        ratio = 1 / found["PyTorch over auto"]
        ratios.append(ratio)
        ours += ratio * found["PyTorch (us)"]
        pytorchs += found["PyTorch (us)"]
        size = "x".join(map(str, (one.input_shape[0], *one.input_shape[2:])))
        texts.append(f"{size} {ratio:.3g}{'' if kind == 'own path' else f' ({kind})'}")
    return {
        "sizes": count,
        "by a neighbour": kinds["neighbour"],
        "by PyTorch's own path": kinds["own path"],
        "searched": kinds["searched"],
        "sum over PyTorch's": ours / pytorchs,
        "geometric mean": numbers.geometric_mean(ratios),
        "worst": max(ratios),
        "earlier sizes (s)": searching_s,
        "a size (s)": (time.perf_counter() - begin) / count,
        "each size": ", ".join(texts),
    }
