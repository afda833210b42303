"""``convert`` and ``revert``: a model's convolutions and batch norms become this package's, and
PyTorch's again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cudnn_autotune.core.display import count, html_table
from cudnn_autotune.models import classes
from cudnn_autotune.models import memory_format as layouts
from cudnn_autotune.models.memory_format import MemoryFormatChoice
from cudnn_autotune.nn.modules import WithPolicy, check_inputs, check_model
from cudnn_autotune.norms.choices import choices_of
from cudnn_autotune.norms.memory import NormChoice
from cudnn_autotune.sampling.strategy import SamplingMode
from cudnn_autotune.tuning.settings import check_policy

Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger(__name__)
_measured: WeakKeyDictionary[nn.Module, MemoryFormatChoice] = WeakKeyDictionary()


@dataclass(frozen=True)
class Conversion:
    """The convolutions of a model that are served and left, and the choices for batch norms."""

    served: dict[str, str]
    """The class of each served convolution, and of each served module that calls one, by the
    module's name in the model."""
    left: dict[str, str]
    """The reason why PyTorch serves a convolution, by the module's name in the model."""
    memory_format: MemoryFormatChoice | None
    """The times of ``memory_format="auto"``; None without it, or for a copy."""
    norms: dict[str, tuple[NormChoice, ...]] = field(default_factory=dict)
    """The choices for each batch norm that this package may serve, and each norm in channels_last,
    by the module's name in the model. Each signature of a call on a GPU has one, of a batch norm in
    training. There is none before the first such call, and for a copy."""

    @property
    def _summary(self) -> str:
        parts = [f"{len(self.served)} served by cudnn_autotune, {len(self.left)} by PyTorch"]
        if self.served and not torch.cuda.is_available():
            parts.append("without a GPU PyTorch computes all")
        if self.norms:
            measured = sum(map(bool, self.norms.values()))
            parts.append(f"{count(len(self.norms), 'batch norm')}, {measured} measured")
        return "; ".join(parts)

    def _norms(self) -> list[tuple[str, str]]:
        """Returns the choices for batch norms by the norm's name, and the number without one."""
        lines = [
            (name or "the model", str(choice))
            for name, choices in self.norms.items()
            for choice in choices
        ]
        if waiting := sum(not choices for choices in self.norms.values()):
            when = "measured when they first run in training on a GPU"
            lines.append((count(waiting, "batch norm"), when))
        return lines

    def __repr__(self) -> str:
        chosen = "" if self.memory_format is None else f"; {self.memory_format}"
        return f"Conversion({self._summary}{chosen})"

    def _repr_html_(self) -> str:
        left = [(name or "the model", f"by PyTorch: {why}") for name, why in self.left.items()]
        served = [(name or "the model", kind) for name, kind in self.served.items()]
        chosen = [] if self.memory_format is None else [("memory format", self.memory_format)]
        return html_table(self._summary, [*chosen, *left, *served, *self._norms()])

    def __str__(self) -> str:
        lines = [self._summary]
        lines += [f"{name or 'the model'}: {reason}" for name, reason in self.left.items()]
        if self.memory_format is not None:
            lines.append(str(self.memory_format))
        lines += [f"{name}: {choice}" for name, choice in self._norms()]
        return "\n".join(lines)


def convert(
    model: Model,
    sampling: SamplingMode | str | None = None,
    workspace_limit: int | None = None,
    *,
    memory_format: torch.memory_format | Literal["auto"] | None = None,
    example_input: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    norms: bool = True,
) -> Model:
    """Makes every convolution of a model run the engine that a search chose for its shape. Every
    batch norm trains by the faster of PyTorch's functions and this package's operators.

    It works in place, by giving modules another class. Parameters, buffers, hooks, names, the state
    dict, and references of optimizers and wrappers stay as they are. A subclass with a forward of
    its own keeps it, and the calls of ``torch.nn.functional.conv2d`` below it are served. So are
    all calls below the model's own forward. Modules that are served already keep their settings,
    and a UserWarning says so if they differ from the given ones. ``conversion(model)`` says what
    was left to PyTorch, and why; ``revert(model)`` undoes it. The model may be on any device. On
    one that is not CUDA it computes the same bits as before.

    Args:
        model: any module, a single convolution too.
        sampling: the mode of the converted modules, as of ``cudnn_autotune.Conv2d``. In a mode
            without timing, norms are computed by the operators in the form that is expected to be
            the fastest.
        workspace_limit: the limit of their engines' workspace in bytes, as there.
        memory_format: None leaves the model's layout. ``torch.channels_last`` and
            ``torch.contiguous_format`` change it as ``model.to(memory_format=...)`` does. Weights
            of 5 dimensions become channels_last_3d, and weights of 1-d convolutions channels_last
            as images of height 1. ``"auto"`` times the model in both and takes the faster; it stays
            contiguous if its outputs differ: see docs/reference/convert.md. Unless it is None or
            contiguous, group and instance norms return outputs in channels_last where their inputs
            are; PyTorch's are contiguous. This package's kernels then compute them, forward and
            backward, where they are faster.
        example_input: the model's input for ``"auto"``: a tensor, a tuple of positional arguments,
            or a dict of keyword arguments, in the layout of later calls.
        norms: whether batch norms in training on a GPU are measured, with the activation of their
            class or ``torch.nn.Sequential``. This package's operators compute them if they are
            faster: see docs/reference/norms.md. False leaves to PyTorch the norms that are not
            converted yet, and group and instance norms that no forward of the model's own calls.

    Returns:
        The same model. If it has nothing to convert, a UserWarning says so.

    Raises:
        TypeError: ``model`` is not a module, ``norms`` no bool, or ``example_input`` of another
            type, or not what the model's forward takes.
        ValueError: the model is compiled by torch.jit; the mode is unknown or the limit negative;
            ``memory_format`` is another value, comes without ``example_input``, or the model is
            wrapped for several GPUs already.
        Exception: the model's on ``example_input``. After any error the model is as it was.
    """
    _check_model(model)
    check_policy(sampling, workspace_limit)
    if not isinstance(norms, bool):
        raise TypeError(f"norms must be True or False, got {norms!r}")
    arguments = layouts.check_arguments(memory_format, example_input)
    if memory_format == "auto":
        check_inputs(model, *arguments, "example_input")
    kept = _settings_kept(model, sampling, workspace_limit)
    with _undone_on_error(model):
        _swap(model, sampling, workspace_limit, norms)
        if norms:
            keeps_layout = memory_format not in (None, torch.contiguous_format)
            _swap_norms(model, sampling, keeps_layout)
        if memory_format == "auto":
            _measured[model] = layouts.choose(model, *arguments)
        elif memory_format is not None:
            layouts.apply(model, memory_format)
    done = conversion(model)
    _log.info("%s: %s", type(model).__name__, done)
    if kept:
        warnings.warn(kept, stacklevel=2)
    if not done.served and not done.norms:
        reasons = "".join(f"; {name or 'it'}: {reason}" for name, reason in done.left.items())
        may_call = any(classes.is_ours(module) for module in model.modules())
        known = "that can be seen beforehand" if may_call else "that cudnn_autotune can serve"
        warnings.warn(f"{type(model).__name__} has no convolution {known}{reasons}", stacklevel=2)
    return model


def revert(model: Model) -> Model:
    """Gives every served module the class that it had before, in place.

    It works for copies and pickled models too. Modules that were created as
    ``cudnn_autotune.Conv2d`` become ``torch.nn.Conv2d``. A user's class derived from ours stays,
    and so does the layout of the weights.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_model(model)
    for module in model.modules():
        original = classes.original_class(type(module)) if classes.is_ours(module) else None
        if original is not None:
            _set_class(module, original, {})
    _measured.pop(model, None)
    return model


def conversion(model: nn.Module) -> Conversion:
    """Returns the modules that this package serves now, and its reasons to leave the rest.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_model(model)
    served, left, norms = {}, {}, {}
    for name, module in model.named_modules():
        if classes.serves_norms(module):
            if classes.is_norm(module):
                norms[name] = choices_of(module)
            continue
        try:
            if classes.is_replaced(module):
                left[name] = "its forward is set on the module, and does not call its class's"
            elif classes.is_ours(module):
                if classes.has_convolution(module):
                    served[name] = type(module).__name__
            elif classes.class_for(module) is not None:
                left[name] = "it is not converted"
        except classes.NotConverted as reason:
            left[name] = str(reason)
    return Conversion(served, left, _measured.get(model), norms)


def _check_model(model: nn.Module) -> None:
    check_model(model)
    if classes.is_scripted(model):
        raise ValueError(
            "model must not be compiled by torch.jit, which fixes what it calls: convert it before "
            "torch.jit.trace, or use torch.compile"
        )


def _settings_kept(
    model: nn.Module, sampling: str | None, workspace_limit: int | None
) -> str | None:
    """Returns the warning that served modules keep other settings; None if none does."""
    given = {"sampling": sampling, "workspace_limit": workspace_limit}
    asked = {name: value for name, value in given.items() if value is not None}
    served = [module for module in model.modules() if isinstance(module, WithPolicy)]
    kept = [
        {name: getattr(module, name) for name in asked}
        for module in served
        if any(getattr(module, name) != value for name, value in asked.items())
    ]
    if not kept:
        return None
    of_them = " or ".join(
        dict.fromkeys(", ".join(f"{n}={v!r}" for n, v in s.items()) for s in kept)
    )
    wanted = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    return (
        f"{len(kept)} module(s) of {type(model).__name__} are served by cudnn_autotune already and "
        f"keep {of_them}, not {wanted}: call cudnn_autotune.revert(model) before, or set the "
        "attributes of the modules"
    )


def _swap(model: nn.Module, sampling: str | None, workspace_limit: int | None, norms: bool) -> None:
    given = {"sampling": sampling, "workspace_limit": workspace_limit}
    policy = {name: value for name, value in given.items() if value is not None}
    outermost = set(classes.outermost(model))
    for module in list(model.modules()):
        serves_calls = module in outermost and (
            norms or not isinstance(module, classes.SERVED_BELOW)
        )
        try:
            made = classes.class_for(module, serves_calls)
        except classes.NotConverted:
            continue
        if made is not None:
            _set_class(module, made, policy)
    for module in model.modules():
        if (made := classes.class_for_pads(module)) is not None:
            _set_class(module, made, {})


def _swap_norms(model: nn.Module, sampling: str | None, keeps_layout: bool) -> None:
    policy = {} if sampling is None else {"sampling": sampling}
    for module in model.modules():
        if classes.serves_norms(module):  # it keeps its settings
            continue
        if (made := classes.class_for_norms(module, keeps_layout)) is not None:
            _set_class(module, made, policy if classes.is_norm(module) else {})


def _set_class(module: nn.Module, cls: type[nn.Module], policy: dict[str, Any]) -> None:
    """Changes the class of a module; ``policy`` replaces its attributes of this package."""
    module.__class__ = cls
    for name in classes.POLICY:
        vars(module).pop(name, None)
    vars(module).update(policy)


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    before = [(module, type(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls in before:
            if type(module) is not cls:
                _set_class(module, cls, {})
        raise
