"""The memory format of a model's weights: set by name, or the faster of two, by measurement."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cudnn_autotune.compile import computation
from cudnn_autotune.compile.communication import is_among_ranks, watched
from cudnn_autotune.engines.conv_layout import laid_out
from cudnn_autotune.models import classes
from cudnn_autotune.nn.modules import WithPolicy
from cudnn_autotune.nn.untouched import (
    check_initialized,
    step,
    tensors_in,
    untouched,
)
from cudnn_autotune.store import locked, settings, verdicts
from cudnn_autotune.timers.programs import time_in_turns
from cudnn_autotune.tuning.outputs import difference

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_CONTIGUOUS, _CHANNELS_LAST = torch.contiguous_format, torch.channels_last
CANDIDATES = (_CONTIGUOUS, _CHANNELS_LAST)
_FORMATS = (_CONTIGUOUS, _CHANNELS_LAST, torch.channels_last_3d)
RULE = 2
"""The version of the rule of layouts. Times of another one on disk are measured again."""
_log = logging.getLogger(__name__)
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass(frozen=True)
class MemoryFormatChoice:
    """The memory format that a model got from ``memory_format="auto"``, and the reason."""

    chosen: torch.memory_format
    """``torch.channels_last`` or ``torch.contiguous_format``."""
    times_ms: dict[torch.memory_format, float]
    """Median milliseconds of a step in each; empty if they were not timed."""
    reason: str
    """The rule that decided, or the reason why nothing was measured."""

    def __str__(self) -> str:
        times = ", ".join(f"{_name(f)} {ms:.3f} ms a step" for f, ms in self.times_ms.items())
        return f"{_name(self.chosen)}: {self.reason}" + (f" ({times})" if times else "")


def _name(memory_format: torch.memory_format) -> str:
    return str(memory_format).removeprefix("torch.").removesuffix("_format")


def check_arguments(
    memory_format: object, example_input: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of ``example_input``.

    Raises:
        ValueError, TypeError: as ``convert``.
    """
    if memory_format not in (None, "auto", *_FORMATS):
        *others, last = map(str, _FORMATS)
        allowed = f"{', '.join(others)} or {last}"
        raise ValueError(f"memory_format must be None, 'auto', {allowed}, got {memory_format!r}")
    if memory_format != "auto":
        if example_input is not None:
            raise ValueError("example_input is only for memory_format='auto'")
        return (), {}
    allowed = "a tensor, a tuple of positional arguments, or a dict of keyword arguments"
    if example_input is None:
        raise ValueError(f"example_input must be given for memory_format='auto': {allowed}")
    if isinstance(example_input, Tensor):
        return (example_input,), {}
    if isinstance(example_input, tuple):
        return example_input, {}
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    raise TypeError(f"example_input must be {allowed}, got {type(example_input).__name__}")


def apply(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Changes the layout, in place, of weights, buffers and gradients of 4 and 5 dimensions, and of
    1-d convolutions' weights and gradients.

    Raises:
        ValueError: the model is wrapped for several GPUs, or has lazy parameters.
    """
    weights = _laid_out(model)
    _set({t: _as(t, memory_format) for t in (*weights, *_gradients(weights))})


def in_each(model: nn.Module, run: Callable[[], Result]) -> list[Result]:
    """Returns the results of ``run`` while the model is contiguous, and channels_last. The layout
    is then as before.

    Raises:
        ValueError: as :func:`apply`.
    """
    layouts = _Layouts(_laid_out(model))
    try:
        results = []
        for memory_format in CANDIDATES:
            layouts.set(memory_format)
            results.append(run())
        return results
    finally:
        layouts.restore()


def choose(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    together: Callable[[list[float] | None], list[float] | None] = lambda times_ms: times_ms,
) -> MemoryFormatChoice:
    """Times the model's step contiguous and channels_last, and applies the faster.

    A step is the forward, and the backward of the summed outputs if the model is in training mode
    and gradients are on. Outputs of both are compared in eval mode, where most dropout is off;
    other random operators draw equal numbers in both. Gradients, buffers, the contents of the
    inputs and random number generators stay as they are.

    A model that communicates with other processes stays contiguous. By its own clock each process
    would run it another number of times, and wait for the others for ever.

    Args:
        together: a function by which ranks agree. It gets the milliseconds of a step contiguous and
            channels_last, or None if the model cannot be channels_last, and returns the deciding
            ones.

    Raises:
        ValueError: the model is wrapped for several GPUs, or has lazy parameters.
        Exception: the contiguous model's, or of ``together``. The layout is then as before.
    """
    layouts = _Layouts(_laid_out(model))
    if not layouts.weights:
        together([0.0, 0.0])
        return MemoryFormatChoice(_CONTIGUOUS, {}, "no weight has a layout to choose")
    refusal = "another rank cannot be channels_last"
    with layouts.restored_on_error():
        times_ms: list[float] | None = None
        is_kept = False
        try:
            with untouched(model, args, kwargs):
                times, is_kept = _times(layouts, model, args, kwargs)
                times_ms = [times.contiguous, times.channels_last]
        except _Refused as refused:
            refusal = str(refused)
        agreed_ms = together(times_ms)
        if agreed_ms is None:
            warnings.warn(f"memory_format='auto' stays contiguous: {refusal}", stacklevel=4)
            choice = MemoryFormatChoice(_CONTIGUOUS, {}, refusal)
        else:
            by_format = dict(zip(CANDIDATES, agreed_ms, strict=True))
            best = min(CANDIDATES, key=lambda f: by_format[f])
            reason = "the faster, from the store" if is_kept else "the faster"
            choice = MemoryFormatChoice(best, by_format, reason)
        layouts.set(choice.chosen)
    _set({t: _as(t, choice.chosen) for t in _gradients(layouts.weights)})
    return choice


def _times(
    layouts: _Layouts, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Times, bool]:
    """Returns the times of a step in each layout, and whether an earlier process has measured them.

    Raises:
        _Refused: channels_last fails, or gives other outputs, or a locked store has no times.
    """
    learns = model.training and torch.is_grad_enabled()
    tensors = tensors_in((args, kwargs, list(model.parameters())))
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))

    def a_step() -> None:
        with torch.set_grad_enabled(learns):
            step(model, args, kwargs)

    def compared(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
        dtype = _least_precise(layouts.weights, device)
        return [output.to(dtype) for output in _outputs(model, *inputs)]

    inputs = (args, kwargs)
    contiguous, channels_last = (layouts.under(f, compared) for f in CANDIDATES)

    def wrong() -> str | None:
        expected, found = contiguous(inputs), channels_last(inputs)
        if not expected:
            raise _Refused("its outputs have no floating-point tensor that could be compared")
        return difference(expected, found, contiguous, inputs)

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if is_among_ranks():
            with watched() as collectives:
                layouts.under(_CONTIGUOUS, a_step)()
                contiguous(inputs)
            if collectives:
                names = ", ".join(sorted(collectives))
                raise _Refused(f"it communicates between ranks ({names})")
        text = wrong()
        if text is not None:
            # PyTorch fills a tensor with random numbers in the order of its memory. A compiled
            # model would draw others in either layout, so its original is run here.
            with _EqualDraws() as draws:
                other_text = wrong()
            text = other_text if draws.any else text
        if text is not None:
            raise _Refused(f"in channels_last {text}")
        steps = {_name(f): layouts.under(f, a_step) for f in CANDIDATES}

        def measured() -> _Times:
            # The first steps of a model, or with other processes beside it, often wait for the
            # host, which hides the layouts' difference on the GPU.
            times = time_in_turns(steps, (), device.type == "cuda", with_host=False)
            return _Times(*(times[_name(f)] for f in CANDIDATES))

        name = _name_on_disk(model, steps[_name(_CONTIGUOUS)], learns, device)
        if name is None and not settings.is_locked():
            return measured(), False
        try:
            return verdicts.kept_or_measured(
                *(device.index, name or "", _Times, measured),
                is_final=lambda _: computation.is_settled(),
            )
        except verdicts.LockedError:
            locked.missed("layouts", type(model).__name__)
            raise _Refused(locked.REASON) from None


def _name_on_disk(
    model: nn.Module, step: Callable[[], None], learns: bool, device: torch.device
) -> str | None:
    """Returns the name of the times of a model's step; None if the step's programs are unknown, or
    times are not kept.

    Args:
        step: the step in contiguous memory.
    """
    served = [m for m in model.modules() if isinstance(m, WithPolicy) or classes.is_norm(m)]
    policies = [tuple(getattr(one, name, None) for name in classes.POLICY) for one in served]
    if not computation.is_kept(mode for mode, _ in policies):
        return None
    try:
        with computation.recorded() as operators:
            step()
    except Exception as failure:
        _log.info("a model's operators cannot be recorded: %s", failure)
        return None
    if not operators:
        return None
    states = [(type(module).__qualname__, module.training) for module in model.modules()]
    facts = (computation.text_of((learns, states, policies)), computation.conditions(device.type))
    return verdicts.name_of("layouts", RULE, *operators, *facts)


@dataclass(frozen=True)
class _Times:
    """Milliseconds of a step in each layout, as they are kept on disk."""

    contiguous: float
    channels_last: float


class _EqualDraws(TorchDispatchMode):
    """A mode in which random operators draw the same numbers as for contiguous tensors."""

    any = False
    """Whether there were any random operators."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or "out" in kwargs:
            return func(*args, **kwargs)
        self.any = True
        if func._schema.is_mutable:
            written = args[0]
            drawn = written.clone(memory_format=_CONTIGUOUS)
            func(drawn, *args[1:], **kwargs)
            return written.copy_(drawn)
        return func(*tree_map(_contiguous, args), **tree_map(_contiguous, kwargs))


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


class _Refused(Exception):
    """The error of a model that cannot be channels_last."""


class _Layouts:
    """The weights of a model in each layout, for immediate changes."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self._before = {tensor: tensor.detach() for tensor in weights}
        self._data = {f: {t: _as(t, f) for t in weights} for f in CANDIDATES}
        self._current: torch.memory_format | None = None

    def set(self, memory_format: torch.memory_format) -> None:
        if memory_format is not self._current:
            _set(self._data[memory_format])
            self._current = memory_format

    def under(
        self, memory_format: torch.memory_format, run: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        """Returns ``run`` in a layout. It raises _Refused if it fails in channels_last."""

        def in_layout(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self.set(memory_format)
            try:
                return run(*args, **kwargs)
            except Exception as failure:
                if memory_format == _CONTIGUOUS:
                    raise
                text = str(failure).partition("\n")[0]
                reason = f"channels_last fails: {type(failure).__name__}: {text}"
                raise _Refused(reason) from failure

        return in_layout

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        _set(self._before)


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns copies of the output's floating-point tensors, in eval mode. Each run begins with the
    same random numbers, inputs and buffers."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), untouched(model, args, kwargs):
            found = tensors_in(model(*args, **kwargs))
            return [t.detach().clone() for t in found if t.is_floating_point()]
    finally:
        for module, training in modes:
            module.training = training


def _least_precise(weights: list[Tensor], device: torch.device) -> torch.dtype:
    """Returns the narrowest type in the computation; outputs may have a wider one."""
    dtypes = [t.dtype for t in weights if t.is_floating_point()]
    if torch.is_autocast_enabled(device.type):
        dtypes.append(torch.get_autocast_dtype(device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _laid_out(model: nn.Module) -> list[Tensor]:
    """Returns the weights and buffers with a choice of layout, each once: all of 4 and 5
    dimensions, and the weights of 1-d convolutions.

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
    of_1d = {
        module._parameters.get("weight")  # a parametrized weight is computed
        for module in model.modules()
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
    }
    has_layout = {t for t in every if t.dim() in (4, 5) or (t in of_1d and t.dim() == 3)}
    return [t for t in every if t in has_layout and t.layout == torch.strided]


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _as(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns the tensor's data in a layout."""
    with torch.inference_mode(tensor.is_inference()):  # else the weight could not be trained
        return laid_out(tensor.detach(), memory_format)


def _set(data: Mapping[Tensor, Tensor]) -> None:
    for tensor, copy in data.items():
        tensor.data = copy
    torch.clear_autocast_cache()  # it holds casts of the weights, by the tensors' identity
