"""PyTorch's batch norms, as drop-ins that train by this package's kernels.

``convert(model)`` gives them to a model. A norm alone is PyTorch's function, whose operators look
for this module's choice (csrc/norm/aten_norms.h). A norm with an activation, called by its class or
a ``torch.nn.Sequential``, is one operator in training on a GPU if that is the fastest
(``choices``), else PyTorch's functions. All that is one call of C++, without the Python of
PyTorch's modules (csrc/bind/bindings.h). Calls that Python has to see are left to the module's
original class: ``momentum=None``, transforms, modes, tensor subclasses, tracing. A compiler traces
PyTorch's functions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from cudnn_autotune.core.extension import _C
from cudnn_autotune.nn.modules import Unscriptable
from cudnn_autotune.norms.reference import LEAKY_RELUS

_ACTIVATIONS = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.Sigmoid: "sigmoid",
}
"""Modules that the operators compute behind a norm, beside those with a parameter."""

Tail = Callable[[Any], Sequence[nn.Module]]
_Forward = TypeVar("_Forward", bound=Callable[..., Any])

_tails: dict[type, Tail] = {}
"""The registered classes, and the modules that each calls after its norm."""


def with_signature_of(original: Callable[..., Any]) -> Callable[[_Forward], _Forward]:
    """Gives a forward the signature of PyTorch's, which differs between versions."""
    return cast("Callable[[_Forward], _Forward]", functools.wraps(original))


def traced(module: nn.Module, input: Proxy) -> Tensor:
    """Returns a call of a module in a tracer's graph, where PyTorch's class is one call."""
    tracer: Any = input.tracer
    name = tracer.path_of_module(module)
    return cast("Tensor", tracer.create_proxy("call_module", name, (input,), {}))


class ServedNorm(Unscriptable, _BatchNorm):
    """The forward of BatchNorm1d to BatchNorm3d."""

    @with_signature_of(_BatchNorm.forward)
    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            found = _computed(self, input, "identity", (), True)
            if found is not None:
                return found
        if isinstance(input, Proxy):
            return traced(self, input)
        return super().forward(input)

    def _get_name(self) -> str:
        return f"{__name__}.{super()._get_name()}"


class BatchNorm1d(ServedNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that trains by this package's operators on a GPU."""


class BatchNorm2d(ServedNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that trains by this package's operators on a GPU."""


class BatchNorm3d(ServedNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that trains by this package's operators on a GPU."""


class LazyBatchNorm1d(ServedNorm, nn.LazyBatchNorm1d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyBatchNorm1d``. Its first call makes it a :class:`BatchNorm1d`."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(ServedNorm, nn.LazyBatchNorm2d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyBatchNorm2d``. Its first call makes it a :class:`BatchNorm2d`."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(ServedNorm, nn.LazyBatchNorm3d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyBatchNorm3d``. Its first call makes it a :class:`BatchNorm3d`."""

    cls_to_become = BatchNorm3d


CLASSES = (BatchNorm1d, BatchNorm2d, BatchNorm3d)


class ServedNormAct(Unscriptable, _BatchNorm):
    """The forward of a class that holds a norm and following modules: a base, beside that class, of
    the class made for it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if (
            not torch.compiler.is_compiling()
            and len(args) == 1
            and not kwargs
            and not _has_any_global_hook()
        ):
            tail = tail_of(type(self), self)  # None where its class was not registered
            if tail is not None and (activation := _activation_of(tail)) is not None:
                found = _computed(self, args[0], activation, tuple(tail), False)
                if found is not None:
                    return found
        return super().forward(*args, **kwargs)


def register_norm_act(cls: type[_BatchNorm], tail: Tail) -> None:
    """Lets ``convert(model)`` serve a class that holds a batch norm and an activation.

    The class derives from ``torch.nn.BatchNorm1d``, ``BatchNorm2d`` or ``BatchNorm3d``. Its forward
    takes one tensor, and applies the modules of ``tail(module)`` in turn to the norm's output. One
    operator replaces the forward in training on a GPU, if they are at most one activation that the
    operators compute, and ``torch.nn.Identity``, and none has hooks. Else the forward runs.
    Subclasses are registered for themselves.

    Args:
        cls: the class; its modules are converted after it was registered.
        tail: module -> the modules that its forward calls after the norm, in order.

    Raises:
        TypeError: ``cls`` is not such a class, or ``tail`` cannot be called.
    """
    bases = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if not (isinstance(cls, type) and issubclass(cls, bases)) or cls in (*bases, *CLASSES):
        raise TypeError(
            f"cls must be a class derived from torch.nn.BatchNorm1d to BatchNorm3d, got {cls!r}"
        )
    if not callable(tail):
        raise TypeError(f"tail must be a function of the module, got {tail!r}")
    _tails[cls] = tail


def serves(module: nn.Module, cls: type) -> bool:
    """Returns whether a module of a class holds a norm and following modules."""
    if tail_of(cls, module) is not None:
        return True
    if issubclass(cls, nn.Sequential) and cls.forward is nn.Sequential.forward:
        modules = [one for one in module._modules.values() if one is not None]
        return any(
            isinstance(norm, _BatchNorm) and _activation_of([behind]) is not None
            for norm, behind in itertools.pairwise(modules)
        )
    return False


def tail_of(cls: type, module: nn.Module) -> Sequence[nn.Module] | None:
    """Returns the modules that a module calls after its norm, if its class (or its original class)
    is registered or timm's ``BatchNormAct2d``; else None."""
    original = vars(cls).get("converted_from", cls)
    if original in _tails:
        return _tails[original](module)
    if original.__name__ == "BatchNormAct2d" and original.__module__.startswith("timm."):
        return (module.drop, module.act)  # type: ignore[return-value]
    return None


def _activation_of(tail: Sequence[nn.Module]) -> str | None:
    """Returns the activation that modules compute; None if it is not among the operators', or
    something sees their inputs."""
    found = "identity"
    for module in tail:
        name: str | None
        if type(module) is nn.GELU:
            name = "gelu_tanh" if module.approximate == "tanh" else "gelu"
        elif type(module) is nn.LeakyReLU:
            name = LEAKY_RELUS.get(module.negative_slope)
        else:
            name = _ACTIVATIONS.get(type(module))
        if name is None or is_seen(module) or "identity" not in (found, name):
            return None
        found = found if name == "identity" else name
    return found


def is_seen(module: nn.Module) -> bool:
    """Returns whether something sees a call of a module: a hook, a forward set on it, or a result
    of its method ``compile``."""
    own = vars(module)
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl")
    )


def computed_pair(norm: _BatchNorm, behind: Any, input: Tensor) -> Tensor | None:
    """Returns the output of a norm and the module behind it, if that is an activation and nothing
    sees the tensor between them; else None."""
    tail = (behind,)
    activation = _activation_of(tail)
    if activation is None or is_seen(norm):
        return None
    return _computed(norm, input, activation, tail, True)


def _computed(
    norm: _BatchNorm, input: Any, activation: str, tail: tuple[nn.Module, ...], takes_all: bool
) -> Tensor | None:
    """Returns the output of a norm and the activation behind it. Returns None, without a change,
    for a call that the class of the norm has to compute.

    Args:
        takes_all: whether the class's forward is PyTorch's, so that no call need be left to it.
    """
    found: Tensor | None = _C.batch_norm(norm, input, activation, tail, takes_all)
    return found
