"""PyTorch's batch norms, as drop-ins that train by this package's operators.

``convert(model)`` gives them to a model. A norm and the activation that its class, or a
``torch.nn.Sequential``, calls next are one operator where that is the fastest (``norm_choices``).
Whatever the operators do not do is left to the class that the module had: evaluation,
``momentum=None``, float64, transforms, tensor subclasses, tracing, and a device that is not CUDA. A
compiler traces PyTorch's functions.
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
from torch.utils.checkpoint import _StopRecomputationError

from cudnn_autotune.core.extension import _C
from cudnn_autotune.nn import norm_choices

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)

_ACTIVATIONS = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.Sigmoid: "sigmoid",
}
"""Modules that the operators compute behind a norm, beside ``torch.nn.GELU``."""
_NO_HOOKS: tuple[dict[Any, Any], ...] = ({}, {}, {}, {})

Tail = Callable[[Any], Sequence[nn.Module]]
_Forward = TypeVar("_Forward", bound=Callable[..., Any])

_tails: dict[type, Tail] = {}
"""The classes that were registered, and what each calls after its norm."""


def _with_signature_of(original: Callable[..., Any]) -> Callable[[_Forward], _Forward]:
    """Gives a forward the signature of PyTorch's, which differs between versions."""
    return cast("Callable[[_Forward], _Forward]", functools.wraps(original))


class ServedNorm(_BatchNorm):
    """The forward of BatchNorm1d to BatchNorm3d."""

    @_with_signature_of(_BatchNorm.forward)
    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):  # a tracer takes PyTorch's class for one call
            tracer: Any = input.tracer
            traced: Any = tracer.create_proxy(
                "call_module", tracer.path_of_module(self), (input,), {}
            )
            return cast("Tensor", traced)
        found = _served(self, input, "identity")
        return super().forward(input) if found is None else found

    def _get_name(self) -> str:
        return f"cudnn_autotune.{super()._get_name()}"


class BatchNorm1d(ServedNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that trains by this package's operators on a GPU."""


class BatchNorm2d(ServedNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that trains by this package's operators on a GPU."""


class BatchNorm3d(ServedNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that trains by this package's operators on a GPU."""


_CLASSES = (BatchNorm1d, BatchNorm2d, BatchNorm3d)


class ServedNormAct(_BatchNorm):
    """The forward of a class that holds a norm and what follows it: a base, with that class, of the
    one that is made for it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found = None
        if (
            not torch.compiler.is_compiling()
            and len(args) == 1
            and not kwargs
            and isinstance(args[0], Tensor)
            and not _has_any_global_hook()
        ):
            activation = _activation_of(tail_of(type(self), self))
            found = None if activation is None else _served(self, args[0], activation)
        return super().forward(*args, **kwargs) if found is None else found

    def _get_name(self) -> str:
        return f"cudnn_autotune.{super()._get_name()}"


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` that computes a batch norm and the activation behind it at once, if
    no hook sees what is between them."""

    @_with_signature_of(nn.Sequential.forward)
    def forward(self, input: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(input, Tensor) or _has_any_global_hook():
            return super().forward(input)
        modules = [*self._modules.values()]
        place, last = 0, len(modules) - 1
        while place <= last:
            module: Any = modules[place]
            found = None
            if type(module) in _CLASSES and place < last:
                found = _served_pair(module, modules[place + 1], input)
            input = module(input) if found is None else found
            place += 1 if found is None else 2
        return input


def register_norm_act(cls: type[_BatchNorm], tail: Tail) -> None:
    """Lets ``convert(model)`` serve a class that holds a batch norm and an activation.

    The class derives from ``torch.nn.BatchNorm1d``, ``BatchNorm2d`` or ``BatchNorm3d``. Its forward
    takes one tensor, and returns what the modules of ``tail(module)`` make in turn of that norm's
    output. While they are an activation that the operators compute, or nothing, beside
    ``torch.nn.Identity``, and none has hooks, one operator takes the forward's place in training on
    a GPU. Else the forward runs. Subclasses of the class are registered for themselves.

    Args:
        cls: the class; modules of it are converted after it was registered.
        tail: module -> the modules that its forward calls after the norm, in order.

    Raises:
        TypeError: ``cls`` is not such a class, or ``tail`` cannot be called.
    """
    bases = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if not (isinstance(cls, type) and issubclass(cls, bases)) or cls in (*bases, *_CLASSES):
        raise TypeError(
            f"cls must be a subclass of torch.nn.BatchNorm1d to BatchNorm3d, got {cls!r}"
        )
    if not callable(tail):
        raise TypeError(f"tail must be a function of the module, got {tail!r}")
    _tails[cls] = tail


def serves(module: nn.Module, cls: type) -> bool:
    """Returns whether a module of a class holds a norm with what follows it."""
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
    """Returns the modules that a module calls after its norm, if its class, or the one that its
    class was made for, is registered or timm's ``BatchNormAct2d``; else None."""
    original = vars(cls).get("converted_from", cls)
    if original in _tails:
        return _tails[original](module)
    if original.__name__ == "BatchNormAct2d" and original.__module__.startswith("timm."):
        return (module.drop, module.act)  # type: ignore[return-value]
    return None


def _activation_of(tail: Sequence[nn.Module] | None) -> str | None:
    """Returns the activation that modules compute; None if it is none of the operators', or
    something sees what they are called with."""
    found = "identity"
    for module in tail or ():
        if _is_seen(module):
            return None
        if type(module) is nn.GELU:
            name = "gelu_tanh" if module.approximate == "tanh" else "gelu"
        elif type(module) in _ACTIVATIONS:
            name = _ACTIVATIONS[type(module)]
        else:
            return None
        if "identity" not in (found, name):
            return None
        found = found if name == "identity" else name
    return found


def _is_seen(module: nn.Module) -> bool:
    """Returns whether something sees a call of a module: a hook, or a forward set on it."""
    own = vars(module)
    hooks = (
        own["_forward_hooks"],
        own["_forward_pre_hooks"],
        own["_backward_hooks"],
        own["_backward_pre_hooks"],
    )
    return "forward" in own or hooks != _NO_HOOKS


def _served_pair(norm: _BatchNorm, behind: Any, input: Any) -> Tensor | None:
    """Returns what a norm and the module behind it make of an input, if that is an activation and
    one operator computes both now, else None."""
    if not norm.training and norm._buffers.get("running_mean") is not None:  # a frozen one
        return None
    if _is_seen(norm) or not isinstance(input, Tensor):
        return None
    activation = _activation_of((behind,))
    return None if activation is None else _served(norm, input, activation)


def _served(norm: _BatchNorm, input: Tensor, activation: str) -> Tensor | None:
    """Returns what the operators make of a norm with an activation, or None if they do not."""
    if torch.compiler.is_compiling() or type(input) not in _PLAIN or not _is_on_gpu(input):
        return None
    # By these names, without the lookup of a module's attributes. A parametrized norm has others.
    parameters, buffers = norm._parameters, norm._buffers
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var = buffers["running_mean"], buffers["running_var"]
    except KeyError:
        return None
    steps = None
    if norm.training and norm.track_running_stats:
        if mean is None or var is None or norm.momentum is None:
            return None
        steps = buffers.get("num_batches_tracked")
    elif norm.training or (mean is None and var is None):
        mean = var = None
    else:
        return None
    if norm.eps <= 0 or _is_watched():
        return None
    vectors = (weight, bias, mean, var)
    for one in vectors:
        if one is not None and type(one) not in _PLAIN:
            return None
    signature = norm_choices.signature_of(input, weight, bias, activation, mean is not None)
    choice = norm_choices.known(norm, signature)
    if choice is None:
        if not _is_computed(norm, input, vectors):
            return None
        choice = norm_choices.first_choice(norm, input, signature)
    if choice is None or not choice.is_served:
        return None
    momentum = norm.momentum or 0.0
    rest = (momentum, activation, norm.eps)
    try:
        return _C.train_norm(input, weight, bias, mean, var, steps, *rest)
    except _StopRecomputationError:
        # A checkpoint has what it waits for. PyTorch's function would have updated statistics.
        with torch.no_grad():
            _C.train_norm(input, weight, bias, mean, var, None, *rest)
        raise


def _is_computed(norm: _BatchNorm, input: Tensor, vectors: Sequence[Tensor | None]) -> bool:
    """Returns whether the operators compute what a module does with an input.

    Args:
        vectors: weight, bias, and the running mean and variance that the call updates.
    """
    try:
        norm._check_input_dim(input)
    except ValueError:
        return False
    dtype, device, channels = input.dtype, input.device, input.shape[1:2]
    if dtype not in _DTYPES or input.numel() == 0:
        return False
    weight, bias, *statistics = vectors
    for one in statistics:  # an expanded one cannot be written to by each operator
        if one is not None and (one.dtype != torch.float32 or one.stride() == (0,)):
            return False
    given = [one for one in vectors if one is not None]
    if any(one.device != device or one.shape != channels for one in given):
        return False
    kinds = {one.dtype for one in (weight, bias) if one is not None}
    return len(kinds) < 2 and kinds <= {dtype, torch.float32}


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_watched() -> bool:
    """Returns whether a transform, a mode or a tracer stands between a call and its operators."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch.autograd.forward_ad._current_level >= 0
    )
