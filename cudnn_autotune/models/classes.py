"""The class that a module gets when its model is converted, and the class that it had before.

A module is converted by assigning its ``__class__``. Everything else stays: parameters, buffers,
hooks, attributes, and references to it.

- PyTorch's own classes become ours, by ``COUNTERPARTS``.
- A subclass ``C`` of them gets a new class ``C'``, with the bases ``C`` and our class. Methods that
  ``C`` does not define, or calls by ``super()``, are then ours. If ``C`` has a forward of its own,
  that runs with the module's policy in force. So does the forward of any other module that calls
  ``torch.nn.functional.conv2d`` itself. So does the forward of the outermost modules that are not
  PyTorch's: calls below them may be invisible beforehand.
- Classes that PyTorch makes for a module when it wraps it (``register_parametrization``,
  ``fully_shard``) are made again, on top of the converted class.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from cudnn_autotune.functional import enter_policy, leave_policy
from cudnn_autotune.models import padding
from cudnn_autotune.models.routing import Marking, calls_convolutions, codes
from cudnn_autotune.models.sequential import Sequential
from cudnn_autotune.nn import modules
from cudnn_autotune.nn.modules import WithPolicy
from cudnn_autotune.norms import batch_norms, kept_layouts, synchronised

Class = type[Any]

_NAMES = [f"{kind}{dims}d" for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)]
COUNTERPARTS: dict[Class, Class] = {
    getattr(nn, name): getattr(modules, name)
    for name in (*_NAMES, *(f"Lazy{name}" for name in _NAMES))
}
"""PyTorch's classes -> ours."""
NORMS: dict[Class, Class] = {
    getattr(nn, name): getattr(batch_norms, name)
    for name in (f"{lazy}BatchNorm{dims}d" for lazy in ("", "Lazy") for dims in (1, 2, 3))
} | {nn.SyncBatchNorm: synchronised.SyncBatchNorm}
"""PyTorch's classes of batch norms -> ours."""
KEPT_LAYOUTS: dict[Class, Class] = {
    getattr(nn, name): getattr(kept_layouts, name)
    for name in ("GroupNorm", *(f"InstanceNorm{dims}d" for dims in (1, 2, 3)))
}
"""PyTorch's classes of norms -> ours that keep a layout."""
SERVED_BELOW = (nn.GroupNorm, _InstanceNorm)
"""PyTorch's classes of norms whose operator is served within a converted forward."""
_WITH_NORMS = (
    *(batch_norms.ServedNorm, batch_norms.ServedNormAct, Sequential),
    kept_layouts.KeptLayout,
)
_ORIGINALS = {ours: theirs for theirs, ours in (COUNTERPARTS | NORMS | KEPT_LAYOUTS).items()}
_ORIGINALS[Sequential] = nn.Sequential
_DERIVED: dict[Class, Class] = {}
_MADE_FOR_NORMS: dict[Class, Class] = {}
_METHODS = ("forward", "_conv_forward")
POLICY = ("sampling", "workspace_limit")
_NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_OF_QUANTIZATION = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


class NotConverted(Exception):
    """The reason why a convolution stays as it is."""


class Made(nn.Module):
    """A base of the classes made for classes that are not PyTorch's own."""

    converted_from: Class

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the class by its original class, which can be imported."""
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        if isinstance(reduced, tuple) and reduced[0] is _NEW_OBJECT:
            arguments = (self.converted_from, *reduced[1][1:])
            new = new_converted if isinstance(self, Derived) else new_with_norms
            return (new, arguments, *reduced[2:])
        return reduced


class Derived(Made, WithPolicy):
    """A base of the classes made for classes that convolve."""


def new_converted(original: Class, *args: Any) -> nn.Module:
    """Returns an empty module of the class made for ``original``; pickled modules start so."""
    cls = _derived(original)
    module: nn.Module = cls.__new__(cls, *args)
    return module


def new_with_norms(original: Class, *args: Any) -> nn.Module:
    """Returns an empty module of the class made for ``original``, which holds batch norms."""
    cls = _made_for_norms(original)
    module: nn.Module = cls.__new__(cls, *args)
    return module


def is_ours(module: nn.Module) -> bool:
    """Returns whether this package serves the module's convolution, or its norm."""
    return isinstance(module, (WithPolicy, synchronised.SyncBatchNorm, *_WITH_NORMS))


def serves_norms(module: nn.Module) -> bool:
    """Returns whether this package chooses what computes the module's norm."""
    return isinstance(module, _WITH_NORMS)


def is_norm(module: nn.Module) -> bool:
    """Returns whether the module is a batch norm of PyTorch's, of any kind, or a norm of ours that
    keeps a layout."""
    return isinstance(module, (_BatchNorm, kept_layouts.KeptLayout))


def has_convolution(module: nn.Module) -> bool:
    """Returns whether one of our modules is a convolution, or its forward visibly calls one."""
    original = original_class(type(module))
    return is_convolution(module) or original is None or calls_convolutions(original)


def is_replaced(module: nn.Module) -> bool:
    """Returns whether a forward that is set on one of our modules replaces its class's.

    It does not if it calls that: through a wrapper, a partial, a closure, or by its name.
    """
    forward = vars(module).get("forward")
    if forward is None or not is_ours(module):
        return False
    methods = [getattr(type(module), name, None) for name in _METHODS]
    left, seen = [forward], list[Any]()
    while left:
        one = left.pop()
        if any(one is other for other in seen):
            continue
        seen.append(one)
        if isinstance(one, MethodType):
            if one.__self__ is module and one.__func__ in methods:
                return False
            left.append(one.__func__)
        elif isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, FunctionType):
            if any(set(_METHODS) & set(code.co_names) for code in codes(one.__code__)):
                return False
            filled = (cell for cell in one.__closure__ or () if cell != CellType())
            cells = [cell.cell_contents for cell in filled]
            left += [*cells, getattr(one, "__wrapped__", None)]
    return True


def is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def is_convolution(module: nn.Module) -> bool:
    """Returns whether the module is a convolution of PyTorch's, of any kind."""
    if is_scripted(module):
        return "Conv" in str(getattr(module, "original_name", ""))
    return isinstance(module, _ConvNd) or _is_quantized(module)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules with a forward that is not PyTorch's. Group and instance norms
    of PyTorch's count, too: the operator that they call is served."""
    left = [model]
    while left:
        module = left.pop()
        if is_scripted(module) or isinstance(module, fx.GraphModule):
            continue
        cls = original_class(type(module)) or type(module)
        is_container = not isinstance(module, SERVED_BELOW)
        if is_container and str(cls.forward.__module__).startswith("torch."):
            left += module.children()
        else:
            yield module


def class_for(module: nn.Module, serves_calls: bool = False) -> Class | None:
    """Returns the class to convert the module to; None if it is ours, or computes no convolution
    itself.

    Args:
        serves_calls: whether all calls of its forward are served, even without a visible
            convolution.

    Raises:
        NotConverted: the module is a convolution, or calls one, and must stay as it is.
    """
    if is_ours(module):
        return None
    if is_scripted(module):
        if is_convolution(module):
            raise NotConverted("it is compiled by torch.jit")
        return None
    if _is_quantized(module):
        raise NotConverted("it is quantized, and runs kernels for integers")
    cls = type(module)
    if isinstance(module, fx.GraphModule):
        if calls_convolutions(cls):
            raise NotConverted("it is an fx.GraphModule, which generates its forward")
        return None
    try:
        made = _converted(cls, serves_calls)
    except TypeError as error:  # raised by metaclasses and `__init_subclass__`
        raise NotConverted(f"no class can be made from {cls.__name__}: {error}") from error
    if made is None:
        if is_convolution(module):
            raise NotConverted(f"cudnn_autotune has no counterpart of {cls.__name__}")
        return None
    for name in POLICY:
        if hasattr(module, name):
            raise NotConverted(f"it has an attribute {name!r} of its own")
    if "forward" in vars(module) and getattr(made, "forward", None) is not cls.forward:
        raise NotConverted("its forward is set on the module, where no class can replace it")
    return made


def class_for_pads(module: nn.Module) -> Class | None:
    """Returns the class whose convolutions pad what is padded in front of them, or None."""
    return Sequential if padding.pads(module) else None


def class_for_norms(module: nn.Module, keeps_layout: bool) -> Class | None:
    """Returns the class whose norms this package's operators may compute, or None.

    Args:
        keeps_layout: whether group and instance norms return the layout of their inputs.
    """
    cls = original_class(type(module)) or type(module)
    if "forward" in vars(module):
        return None
    if cls in NORMS:
        return NORMS[cls]
    if keeps_layout and cls in KEPT_LAYOUTS:
        return KEPT_LAYOUTS[cls]
    if not batch_norms.serves(module, cls):
        return None
    return Sequential if cls is nn.Sequential else _made_for_norms(cls)


def _made_for_norms(cls: Class) -> Class:
    """Returns the one class made for a class that holds a batch norm and an activation."""
    if cls not in _MADE_FOR_NORMS:
        _MADE_FOR_NORMS.setdefault(cls, _make_for_norms(cls))
    return _MADE_FOR_NORMS[cls]


def _make_for_norms(cls: Class) -> Class:
    is_sequential = issubclass(cls, nn.Sequential)
    served: Any = Sequential if is_sequential else batch_norms.ServedNormAct
    names = ("__module__", "__qualname__", "__doc__", "__init__")
    namespace = {name: getattr(cls, name) for name in names} | {"converted_from": cls}
    if is_sequential:
        namespace["_get_name"] = cls._get_name
    else:

        @functools.wraps(cls.forward)  # it keeps the signature
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return served.forward(self, *args, **kwargs)

        namespace["forward"] = forward
    make: Any = type(cls)  # a user's metaclass, if any
    return make(cls.__name__, (Made, served, cls), namespace)


def original_class(cls: Class) -> Class | None:
    """Returns the class that a module of ``cls`` had before; None if it was not converted."""
    if cls in _ORIGINALS:
        return _ORIGINALS[cls]
    found: Class | None = vars(cls).get("converted_from")
    if found is not None and (not _wraps(cls) or _names(found) == _names(cls)):
        return found
    return _rebuilt(cls, original_class) if _wraps(cls) else None


def _converted(cls: Class, serves_calls: bool = False) -> Class | None:
    if not issubclass(cls, nn.Module):  # a base that a wrapper adds
        return None
    if cls in COUNTERPARTS:
        return COUNTERPARTS[cls]
    if _wraps(cls):
        made = _rebuilt(cls, functools.partial(_converted, serves_calls=serves_calls))
        if made is not None:
            made.converted_from = cls
        return made
    if not (issubclass(cls, tuple(COUNTERPARTS)) or serves_calls or calls_convolutions(cls)):
        return None
    return _derived(cls)


def _derived(cls: Class) -> Class:
    """Returns the one class made for ``cls``."""
    if cls not in _DERIVED:
        _DERIVED.setdefault(cls, _derive(cls))
    return _DERIVED[cls]


def _derive(cls: Class) -> Class:
    theirs = next((base for base in cls.__mro__ if base in COUNTERPARTS), None)
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__init__": cls.__init__,
        "converted_from": cls,
    }
    if theirs is None or any(
        getattr(cls, name, None) is not getattr(theirs, name, None)
        for name in ("forward", "_conv_forward")
    ):
        namespace["forward"] = _served(padding.padding_forward(cls) or cls.forward)
    if theirs is None and not calls_convolutions(cls):  # nothing to show
        namespace |= {"_get_name": cls._get_name, "extra_repr": cls.extra_repr}
    becomes = getattr(cls, "cls_to_become", None)  # only a lazy module has it
    if becomes is not None:
        namespace["cls_to_become"] = _converted(becomes, serves_calls=True)
    bases = (Derived, cls) if theirs is None else (Derived, cls, COUNTERPARTS[theirs])
    make: Any = type(cls)  # a user's metaclass, if any
    return make(cls.__name__, bases, namespace)


def _served(forward: Any) -> Any:
    @functools.wraps(forward)  # it keeps the signature, which torch.export needs
    def served(self: WithPolicy, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with Marking(self.sampling, self.workspace_limit):
                return forward(self, *args, **kwargs)
        enter_policy(self.sampling, self.workspace_limit)
        try:
            return forward(self, *args, **kwargs)
        finally:
            leave_policy()

    return served


def _wraps(cls: Class) -> bool:
    """Returns whether PyTorch made the class to wrap a module of its base."""
    of_parametrization = getattr(vars(cls).get("__getstate__"), "__module__", "")
    names = [f"{base.__module__}.{base.__name__}" for base in cls.__bases__]
    return (
        of_parametrization == "torch.nn.utils.parametrize"
        or "torch.distributed.fsdp.FSDPModule" in names
    )


def _rebuilt(cls: Class, change: Any) -> Class | None:
    """Returns the class, made again on top of its changed bases; None if no base changes.

    ``cls`` itself stays, since copies of the module may share it.
    """
    changed = [change(base) for base in cls.__bases__]
    if not any(changed):
        return None
    bases = tuple(new or old for new, old in zip(changed, cls.__bases__, strict=True))
    make: Any = type(cls)
    return make(cls.__name__, bases, {name: vars(cls)[name] for name in _names(cls)})


def _names(cls: Class) -> set[str]:
    return set(vars(cls)) - {"__dict__", "__weakref__", "converted_from"}


def _is_quantized(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__module__.startswith(_OF_QUANTIZATION) and "Conv" in cls.__name__
