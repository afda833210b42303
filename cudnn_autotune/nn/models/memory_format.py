"""The memory format of a model's weights: set by name, or the faster of two, by measurement."""

from __future__ import annotations

import logging
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_autotune.nn.untouched import (
    check_initialized,
    generators_kept,
    step,
    tensors_in,
    untouched,
)

_CONTIGUOUS, _CHANNELS_LAST = torch.contiguous_format, torch.channels_last
_FORMATS = (_CONTIGUOUS, _CHANNELS_LAST, torch.channels_last_3d)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Relative errors (Frobenius norm) between a model's outputs in two layouts. Rounding grows from
# layer to layer, so these are 16 times the type's precision, that of TF32 for float32. An operator
# that mistakes the layout has an error of about 1.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 2e-2,
    torch.float16: 2e-2,
    torch.bfloat16: 1.3e-1,
}
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
_WARM_UPS = 3
_ROUNDS = 9
_TURN_MS = 20.0
_MOST_STEPS = 50

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryFormatChoice:
    """Which memory format a model got from ``memory_format="auto"``, and why."""

    chosen: torch.memory_format
    """``torch.channels_last`` or ``torch.contiguous_format``."""
    times_ms: dict[torch.memory_format, float]
    """The median time of a step in each, in milliseconds; empty if they were not timed."""
    error: float | None
    """The relative error (Frobenius norm) between the outputs of both; None if not timed."""
    reason: str

    def __str__(self) -> str:
        times = ", ".join(f"{_name(f)} {ms:.3f} ms a step" for f, ms in self.times_ms.items())
        return f"{_name(self.chosen)}: {self.reason}" + (f" ({times})" if times else "")


def _name(memory_format: torch.memory_format) -> str:
    return str(memory_format).removeprefix("torch.").removesuffix("_format")


def check_arguments(
    memory_format: object, example_input: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that ``example_input`` stands for.

    Raises:
        ValueError, TypeError: as ``convert``.
    """
    if memory_format not in (None, "auto", *_FORMATS):
        allowed = ", ".join(map(str, _FORMATS))
        raise ValueError(f"memory_format must be None, 'auto', {allowed}, got {memory_format!r}")
    if memory_format != "auto":
        if example_input is not None:
            raise ValueError("example_input is only for memory_format='auto'")
        return (), {}
    if example_input is None:
        raise ValueError(
            "example_input must be given for memory_format='auto': a tensor, a tuple of positional "
            "arguments, or a dict of keyword arguments"
        )
    if isinstance(example_input, Tensor):
        return (example_input,), {}
    if isinstance(example_input, tuple):
        return example_input, {}
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    raise TypeError(
        "example_input must be a tensor, a tuple of positional arguments, or a dict of keyword "
        f"arguments, got {type(example_input).__name__}"
    )


def apply(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Lays out weights, buffers and gradients of 4 and 5 dimensions in place.

    Raises:
        ValueError: the model is wrapped for several GPUs, or has lazy parameters.
    """
    weights = _laid_out(model)
    _set({t: _as(t, memory_format) for t in (*weights, *_gradients(weights))})


def choose(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryFormatChoice:
    """Times the model's step contiguous and channels_last, and applies the faster.

    A step is the forward, and the backward of the summed outputs if the model is in training mode
    and gradients are on. Outputs of both are compared in eval mode, where dropout is off, since it
    draws other numbers in another layout. Gradients, buffers, the contents of the inputs and random
    number generators stay what they are.

    Raises:
        ValueError: the model is wrapped for several GPUs, or has lazy parameters.
        Exception: whatever the model raises while it is contiguous. The layout is then what it was.
    """
    weights = _laid_out(model)
    if not weights:
        return MemoryFormatChoice(_CONTIGUOUS, {}, None, "no weight has 4 or 5 dimensions")
    learns = model.training and torch.is_grad_enabled()
    tensors = tensors_in((args, kwargs, list(model.parameters())))
    device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
    layouts = {f: {t: _as(t, f) for t in weights} for f in (_CONTIGUOUS, _CHANNELS_LAST)}
    with _restored_on_error(weights), untouched(model, args, kwargs):
        _set(layouts[_CONTIGUOUS])
        expected = _outputs(model, args, kwargs)
        run = _Step(model, args, kwargs, device, learns)
        try:
            with _in_channels_last(layouts):
                error = _relative_error(_outputs(model, args, kwargs), expected)
            if not error <= _tolerance(weights, expected, device):
                raise _Refused(f"channels_last outputs differ by {error:.2g}")
            _set(layouts[_CONTIGUOUS])
            run.turn_ms(_WARM_UPS)
            with _in_channels_last(layouts):
                run.turn_ms(_WARM_UPS)
            times_ms = _take_turns(run, layouts)
            best = min(times_ms, key=lambda f: times_ms[f])
            choice = MemoryFormatChoice(best, times_ms, error, "the faster")
        except _Refused as refused:
            warnings.warn(f"memory_format='auto' stays contiguous: {refused}", stacklevel=4)
            choice = MemoryFormatChoice(_CONTIGUOUS, {}, None, str(refused))
        _set(layouts[choice.chosen])
    _set({t: _as(t, choice.chosen) for t in _gradients(weights)})
    return choice


class _Refused(Exception):
    """The reason why the model cannot be channels_last."""


@contextmanager
def _in_channels_last(
    layouts: Mapping[torch.memory_format, Mapping[Tensor, Tensor]],
) -> Iterator[None]:
    _set(layouts[_CHANNELS_LAST])
    try:
        yield
    except _Refused:
        raise
    except Exception as failure:
        text = str(failure).partition("\n")[0]
        raise _Refused(f"channels_last fails: {type(failure).__name__}: {text}") from failure


class _Step:
    """A step of the model on the example input, and how long some of them take."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        learns: bool,
    ) -> None:
        self._call = (model, args, kwargs)
        self._device = device
        self._learns = learns

    def turn_ms(self, count: int) -> float:
        """Runs ``count`` steps, and returns the milliseconds of one."""
        with torch.set_grad_enabled(self._learns):
            if self._device.type == "cuda":
                return self._turn_on_gpu_ms(count)
            begin = time.perf_counter()
            for _ in range(count):
                step(*self._call)
            return (time.perf_counter() - begin) * 1e3 / count

    def _turn_on_gpu_ms(self, count: int) -> float:
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                step(*self._call)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / count


def _take_turns(
    run: _Step, layouts: Mapping[torch.memory_format, Mapping[Tensor, Tensor]]
) -> dict[torch.memory_format, float]:
    """The median over the rounds of a step's time in each layout. Each round's order is the mirror
    image of the last one's, so that a linear drift of the clock cancels."""
    order = list(layouts)
    times: dict[torch.memory_format, list[float]] = {f: [] for f in order}
    count = 1
    for index in range(_ROUNDS + 1):
        for memory_format in order:
            _set(layouts[memory_format])
            run.turn_ms(1)
            times[memory_format].append(run.turn_ms(count))
        order.reverse()
        if index == 0:  # it only tells how many steps a turn takes
            slower_ms = max(found.pop() for found in times.values())
            count = max(1, min(_MOST_STEPS, math.ceil(_TURN_MS / max(slower_ms, 1e-3))))
    return {f: statistics.median(found) for f, found in times.items()}


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Copies of the output's floating-point tensors, in eval mode."""
    tensors = tensors_in((args, kwargs, list(model.parameters())))
    devices = {t.device.index for t in tensors if t.is_cuda}
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), generators_kept(devices):
            found = tensors_in(model(*args, **kwargs))
            return [t.detach().clone() for t in found if t.is_floating_point()]
    finally:
        for module, training in modes:
            module.training = training


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest of ``|found - expected| / |expected|``; infinity where one is not finite."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return math.inf
    if not expected:
        raise _Refused("its outputs have no floating-point tensor that could be compared")
    errors = [0.0]
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            return math.inf
        norm = other[finite].double().norm().item()
        difference = (one[finite].double() - other[finite].double()).norm().item()
        if norm > 0:
            errors.append(difference / norm)
        elif difference > 0:
            return math.inf
    return max(errors)


def _tolerance(weights: list[Tensor], outputs: list[Tensor], device: torch.device) -> float:
    """That of the least precise type in the computation."""
    dtypes = {t.dtype for t in (*weights, *outputs)}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _laid_out(model: nn.Module) -> list[Tensor]:
    """The weights and buffers that have a layout to choose, each once.

    Raises:
        ValueError: the model has lazy parameters, or is wrapped for several GPUs.
    """
    check_initialized(model)
    # The classes are known by name, because importing them takes a second.
    wrappers = {c.__name__ for module in model.modules() for c in type(module).__mro__} & _WRAPPERS
    if wrappers or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError(
            "memory_format must be given before the model is wrapped for several GPUs "
            f"({', '.join(wrappers) or 'DTensor'}): gradients are laid out by the weights then"
        )
    every = dict.fromkeys((*model.parameters(), *model.buffers()))
    return [t for t in every if t.dim() in _LAST and t.layout == torch.strided]


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _as(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """The tensor's data in a layout. Not a copy if it has that already.

    ``contiguous()`` would keep the strides of a kernel of size 1, which fit both layouts, and by
    which an operator would take the weight as contiguous.
    """
    wanted = _CONTIGUOUS if memory_format == _CONTIGUOUS else _LAST[tensor.dim()]
    with torch.inference_mode(tensor.is_inference()):  # else the weight could not be trained
        return tensor.detach().to(memory_format=wanted)


def _set(data: Mapping[Tensor, Tensor]) -> None:
    for tensor, laid_out in data.items():
        tensor.data = laid_out
    torch.clear_autocast_cache()  # it holds casts of the weights, by the tensors' identity


@contextmanager
def _restored_on_error(weights: list[Tensor]) -> Iterator[None]:
    before = {tensor: tensor.detach() for tensor in weights}
    try:
        yield
    except BaseException:
        _set(before)
        raise
