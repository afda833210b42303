"""The problems that a command is about: of a layer given by its shape, or of a model."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils._pytree import tree_map

from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.engines.problem import CHANNELS_LAST, DTYPES_BY_NAME, OPERATIONS, ConvProblem
from cudnn_autotune.models import memory_format
from cudnn_autotune.models.convert import conversion, convert
from cudnn_autotune.tools.options import refuse

_OPTIONS = {
    "input_shape": "--input",
    "weight_shape": "--weight",
    "memory_format": "--channels-last",
}
_MODEL = "MODEL"
_NOT_OF_USERS = (__file__, importlib.__file__)

CallsOf = Callable[..., Mapping[ConvProblem, int]]


def of_layer(given: dict[str, Any]) -> list[ConvProblem]:
    """One problem for each operation. Raises BadParameter that names the option at fault."""
    shape = given["input"][0]
    fields: dict[str, Any] = {
        "input_shape": shape,
        "weight_shape": given["weight"],
        "groups": given["groups"] or 1,
        "dtype": DTYPES_BY_NAME[given["dtype"]],
        "memory_format": _memory_format(len(shape), given["channels_last"]),
    }
    for name in ("stride", "padding", "dilation"):
        value = given[name]
        if value is not None:
            fields[name] = value[0] if len(value) == 1 else value
    if isinstance(given["padding"], str):
        fields["padding"] = given["padding"]
    try:
        return [
            ConvProblem(op, **fields, bias=bool(given["bias"]) and op == "fprop")
            for op in given["op"] or OPERATIONS
        ]
    except ValueError as error:
        name = str(error).split()[0].rstrip(":")
        raise refuse(_OPTIONS.get(name, f"--{name}"), str(error)) from error


class Model:
    """A model that :func:`load` made of a text, converted, on the device, with inputs. ``given``
    are the command's options: ``dtype``, ``train``, ``input``."""

    def __init__(
        self,
        text: str,
        model: nn.Module,
        given: dict[str, Any],
        device: torch.device,
        inputs: Sequence[Any] | None = None,
        *,
        channels_last: bool,
    ) -> None:
        self._text, self._given = text, given
        convert(model)
        left = conversion(model).left
        if left:
            reasons = "; ".join(dict.fromkeys(left.values()))
            others = f"{count(len(left), 'convolution')} not served by this package: {reasons}"
            say(f"{text}: {others}", err=bool(given.get("as_json")))
        dtype = DTYPES_BY_NAME[given["dtype"]]
        self._model = model.to(device, dtype).train(given["train"])
        if inputs is None:
            inputs = random_inputs(given["input"], dtype, device, channels_last)
        self._inputs = placed(inputs, device, dtype)

    def problems(
        self, calls_of: CallsOf, layout: torch.memory_format | None
    ) -> Mapping[ConvProblem, int]:
        """The problems of the model's convolutions, and how often it calls each, with its weights
        in that layout (None: as they are). Raises ClickException if the model's own code fails."""
        with self._run():
            if layout is not None:
                memory_format.apply(self._model, layout)
            return calls_of(self._model, *self._inputs)

    def faster_layout(self) -> memory_format.MemoryFormatChoice:
        """Measures the model's step in both layouts. Raises as :meth:`problems`."""
        with self._run():
            return memory_format.choose(self._model, tuple(self._inputs), {})

    @contextmanager
    def _run(self) -> Iterator[None]:
        try:
            with torch.set_grad_enabled(self._given["train"]):
                yield
        except Exception as error:  # the user's own code runs here
            raise failed(self._text, self._given["input"], error) from error


def failed(text: str, shapes: Sequence[Sequence[int]], error: Exception) -> click.ClickException:
    """Returns a command's error for one of the code of its model, with inputs of these shapes."""
    given = [f" --input {','.join(map(str, shape))}" for shape in shapes]
    with_inputs = f" with{''.join(given)}" if given else ""
    return click.ClickException(f"{text}{with_inputs}: {type(error).__name__}: {error}")


def random_inputs(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, channels_last: bool
) -> list[torch.Tensor]:
    """Returns a tensor of normal random numbers for each shape."""
    return [
        torch.randn(*shape, device=device)
        .to(dtype)
        .contiguous(memory_format=_memory_format(len(shape), channels_last))
        for shape in shapes
    ]


def placed(
    inputs: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> list[Any]:
    """Returns inputs with their tensors on the device, those of floating-point numbers in the
    dtype."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return [tree_map(moved, value) for value in inputs]


def _memory_format(dims: int, channels_last: bool) -> torch.memory_format:
    last = CHANNELS_LAST.get(dims - 2)
    return last if channels_last and last is not None else torch.contiguous_format


def load(text: str, shapes: Sequence[Sequence[int]]) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Creates the model that ``torchvision:NAME``, ``timm:NAME`` or ``MODULE:CALLABLE`` names.

    It has no trained weights. A module of the user's is found from the current folder.

    Args:
        shapes: of ``--input``.

    Returns:
        The model, and its inputs if the user's callable returns some.

    Raises:
        click.BadParameter: the text names no model; the message says what is missing. There are
            no inputs, or both the callable's and shapes.
        click.ClickException: the user's code fails.
    """
    source, _, name = text.partition(":")
    if not source or not name:
        allowed = "must be torchvision:NAME, timm:NAME or MODULE:CALLABLE"
        raise refuse(_MODEL, f"{allowed}, got {text!r}{_with_source(text)}")
    if source not in ("torchvision", "timm"):
        return _with_inputs(text, _of_user(source, name), shapes)
    if not shapes:
        raise refuse("--input", f"is needed for {text}: the shape of its input, with the batch")
    package = _imported("torchvision.models" if source == "torchvision" else source)
    make = package.get_model if source == "torchvision" else package.create_model
    weights: dict[str, Any] = (
        {"weights": None} if source == "torchvision" else {"pretrained": False}
    )
    try:
        model = make(name, **weights)
    except Exception as error:  # timm has exceptions of its own
        known = package.list_models()
        why = f": {error}" if name in known else did_you_mean(name, known)
        raise refuse(_MODEL, f"{source} has no {name!r}{why}") from error
    assert isinstance(model, nn.Module)
    return model, None


def _with_inputs(
    text: str, made: nn.Module | tuple[nn.Module, Any], shapes: Sequence[Sequence[int]]
) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Returns a user's model and inputs; None stands for those of ``--input``."""
    if isinstance(made, nn.Module):
        if not shapes:
            raise refuse("--input", f"is needed: {text} is a model without inputs")
        return made, None
    model, inputs = made
    if shapes:
        raise refuse("--input", f"not with {text}, which returns the inputs")
    if isinstance(inputs, dict):
        return model, _positional(model, inputs)
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _positional(model: nn.Module, inputs: dict[Any, Any]) -> tuple[Any, ...]:
    """Returns keyword arguments of a model's forward as positional ones; the dict itself if the
    forward does not take them so."""
    try:
        bound = inspect.signature(model.forward).bind(**inputs)
    except TypeError:
        return (inputs,)
    bound.apply_defaults()
    return (inputs,) if bound.kwargs else bound.args


def _with_source(name: str) -> str:
    """The end of an error's text that names torchvision's model of this name, if there is one."""
    try:
        known = importlib.import_module("torchvision.models").list_models()
    except ImportError:
        return ""
    return f"; did you mean 'torchvision:{name}'?" if name in known else ""


def _of_user(module: str, name: str) -> nn.Module | tuple[nn.Module, Any]:
    folder = os.getcwd()
    if folder not in sys.path:  # `python -m` adds it likewise
        sys.path.insert(0, folder)
    try:
        found = _imported(module)
        made = functools.reduce(getattr, name.split("."), found)
    except AttributeError as error:
        raise refuse(
            _MODEL, f"{module} has no {name!r}{did_you_mean(name, vars(found))}"
        ) from error
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise refuse(_MODEL, f"{module}:{name} is neither a model nor a callable that makes one")
    try:
        made = made()
    except (Exception, SystemExit) as error:  # the user's own code runs here
        reason = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"{module}:{name}() fails{_place(error)}: {reason}") from error
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
    if not is_pair and not isinstance(made, nn.Module):
        raise refuse(
            _MODEL,
            f"{module}:{name}() must return a torch.nn.Module or (model, inputs), "
            f"got {type(made).__name__}",
        )
    return made


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = _hint(module, error)
        raise refuse(_MODEL, f"cannot import {module}{_place(error)}: {error}{hint}") from error
    except (Exception, SystemExit) as error:  # the user's own code runs here
        reason = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"{module} fails to import{_place(error)}: {reason}") from error


def _hint(module: str, error: ImportError) -> str:
    """The end of an error's text that says what to name instead of a module that is missing."""
    if "/" in module:
        return "; MODULE is a name as in `import`, of this folder or a package, and no path"
    missing = error.name or ""
    is_named = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{missing}.")
    if not is_named:  # it is one that the user's module imports
        return ""
    if missing in ("torchvision", "timm"):
        return f"; install it: pip install {missing}"
    stem = missing.removesuffix(".py")
    parent = stem.rpartition(".")[0]
    places = getattr(sys.modules.get(parent), "__path__", ()) if parent else [os.getcwd()]
    prefix = f"{parent}." if parent else ""
    return did_you_mean(stem, [prefix + found.name for found in pkgutil.iter_modules(places)])


def _place(error: BaseException) -> str:
    """Returns the last line of the user's code before an error, in brackets; empty without one."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in _NOT_OF_USERS and not frame.filename.startswith("<frozen")
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
