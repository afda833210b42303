"""Service of a forward's calls of ``torch.nn.functional.conv2d`` and its sisters.

The policy is in force on the thread as long as the forward runs. So the calls may be anywhere below
it: in a helper function of another module, a closure, a table. While Dynamo traces, a
``TorchFunctionMode`` marks their inputs instead; the compiled program does not have it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.overrides import TorchFunctionMode

from cudnn_autotune.nn.counterparts import COUNTERPARTS

_CALLS: dict[type[Any], bool] = {}


class Marking(TorchFunctionMode):
    """A mode that marks inputs of PyTorch's convolution functions in a ``with`` block that Dynamo
    traces.

    Args:
        sampling, workspace_limit: as for ``cudnn_autotune.functional.conv2d``.
    """

    def __init__(self, sampling: str | None, workspace_limit: int | None) -> None:
        super().__init__()
        self._policy = {"sampling": sampling, "workspace_limit": workspace_limit}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        ours = COUNTERPARTS.get(func)
        if ours is not None:
            return ours(*args, **(kwargs or {}), **self._policy)
        return func(*args, **kwargs) if kwargs else func(*args)


def calls_convolutions(cls: type[Any]) -> bool:
    """Returns whether the forward that ``cls`` defines names a function of ``COUNTERPARTS``.

    It follows the methods of the class that the forward names, and the functions that it reaches by
    global names (``conv2d_same(...)``, ``F.conv2d(...)``). Functions from a table, an attribute or
    a closure are not seen.
    """
    if cls not in _CALLS:
        _CALLS[cls] = _calls_convolutions(cls)
    return _CALLS[cls]


def _calls_convolutions(cls: type[Any]) -> bool:
    left: list[Any] = [inspect.getattr_static(cls, "forward", None)]
    seen: set[Any] = set()
    while left:
        function = left.pop()
        function = getattr(function, "__func__", function)  # a static or class method
        if not isinstance(function, FunctionType):
            continue
        function = inspect.unwrap(function)
        if function in seen or str(function.__module__).startswith("torch."):
            continue
        seen.add(function)
        for code in codes(function.__code__):
            for found in _reached(code, function.__globals__):
                if any(found is theirs for theirs in COUNTERPARTS):
                    return True
                left.append(found)
            left += [inspect.getattr_static(cls, name, None) for name in code.co_names]
    return False


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code, and the code of functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def _reached(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yields the objects that the code reaches by a global name, or by ``module.name``."""
    found: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found = names.get(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(found, ModuleType):
            found = getattr(found, instruction.argval, None)
        else:
            continue
        yield found
