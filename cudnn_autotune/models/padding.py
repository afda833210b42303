"""Forwards that pad zeros for a convolution, without the padded tensor.

A class is known by the text of its forward, and of the functions that this calls. Versions of a
class with another text keep their forward. So do calls that a compiler traces: it sees what is
padded, and its backend rewrites that.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from cudnn_autotune.nn.modules import Conv1d, Conv2d, Conv3d
from cudnn_autotune.norms.batch_norms import is_seen

Forward = Callable[..., Any]


def padding_forward(cls: type[Any]) -> Forward | None:
    """Returns a forward of a class that computes the same without a padded tensor; None if the
    class is not known."""
    forward = vars(cls).get("forward")
    if not isinstance(forward, FunctionType) or not _calls_pytorchs(cls):
        return None
    known = (convolve for text, convolve in _KNOWN.items() if _reads(forward, text))
    if (convolve := next(known, None)) is None:
        return None

    @functools.wraps(forward)
    def padding(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        found = convolve(self, x, *args, **kwargs) if _may_pad(self, x) else NotImplemented
        return forward(self, x, *args, **kwargs) if found is NotImplemented else found

    return padding


def _calls_pytorchs(cls: type[Any]) -> bool:
    """Returns whether the forward of a class finds PyTorch's methods of a convolution behind it."""
    theirs = next((base for base in cls.__mro__ if base in _PYTORCHS), None)
    behind: Any = super(cls, cls)
    return (
        theirs is not None
        and behind.forward is theirs.forward
        and cls._conv_forward is theirs._conv_forward
    )


def _may_pad(layer: Any, x: Any) -> bool:
    """Returns whether a layer of this package may pad an input itself. Not where a program is
    recorded, nor a gradient: it would hold the input, into which the caller may write, and not the
    padded one. Nor where the weight is parametrized: each reading computes it, and a forward reads
    it once."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if type(x) is not Tensor or not _is_served(x) or is_parametrized(layer):
        return False
    return not torch.is_grad_enabled() or not any(
        one is not None and one.requires_grad for one in (x, layer.weight, layer.bias)
    )


def _is_served(x: Tensor) -> bool:
    """Returns whether the result may have other bits than PyTorch's, and PyTorch's errors of images
    without pixels are not to be expected."""
    return x.is_cuda and x.numel() > 0


def convolved(layer: Any, x: Tensor, sizes: Sequence[int], own: Any = 0) -> Any:
    """Convolves an input padded with zeros by a layer of this package.

    Args:
        sizes: of :func:`torch.nn.functional.pad`.
        own: the padding that the layer adds.

    Returns:
        The output; NotImplemented if the convolution cannot pad so.
    """
    n = len(layer.kernel_size)
    if (
        "_conv_forward" in vars(layer)
        or isinstance(own, str)
        or layer.padding_mode != "zeros"
        or any(sizes[2 * n :])
    ):
        return NotImplemented
    own = (own,) if isinstance(own, int) else own
    own = own * n if len(own) == 1 else own  # PyTorch takes one number for all dimensions
    every = [*sizes, *[0] * (2 * n - len(sizes))]
    sides = [tuple(every[2 * d + i] + own[n - 1 - d] for d in reversed(range(n))) for i in (0, 1)]
    if min(every) < 0:
        return NotImplemented
    padding = sides[0] if sides[0] == sides[1] else sides[0] + sides[1]
    return layer._call(
        (x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
    )


PADS = {getattr(nn, f"{kind}Pad{d}d") for kind in ("Zero", "Constant") for d in (1, 2, 3)}
_CONVOLUTIONS = {Conv1d, Conv2d, Conv3d}
_PYTORCHS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}


def pads(module: nn.Module) -> bool:
    """Returns whether a module is PyTorch's ``Sequential`` with a pad in front of a convolution of
    this package."""
    is_plain = type(module) is nn.Sequential and "forward" not in vars(module)
    return is_plain and any(
        type(pad) in PADS and type(behind) in _CONVOLUTIONS
        for pad, behind in itertools.pairwise(module._modules.values())
    )


def convolved_pair(pad: Any, layer: Any, x: Any) -> Any:
    """Returns the output of a pad and the convolution behind it, which pads itself; None for other
    modules, and where something sees the padded tensor."""
    if type(layer) not in _CONVOLUTIONS or is_seen(pad) or is_seen(layer):
        return None
    if pad.value != 0 or not _may_pad(layer, x):
        return None
    found = convolved(layer, x, pad.padding, layer.padding)
    return None if found is NotImplemented else found


_CAUSAL = """
def forward(self, x, cache_x=None):
    padding = list(self._padding)
    if cache_x is not None and self._padding[4] > 0:
        cache_x = cache_x.to(x.device)
        x = torch.cat([cache_x, x], dim=2)
        padding[4] -= cache_x.shape[2]
    x = F.pad(x, padding)
    return super().forward(x)
"""
"""The forward of Wan's and Qwen-Image's causal convolutions in diffusers."""


def _convolve_causal(layer: Any, x: Tensor, cache_x: Tensor | None = None) -> Any:
    padding = list(layer._padding)
    if cache_x is not None and padding[4] > 0:
        padding[4] -= cache_x.shape[2]
        if padding[4] < 0:
            return NotImplemented
        x = torch.cat([cache_x.to(x.device), x], dim=2)
    return convolved(layer, x, padding, layer.padding)


_SAME = """
def forward(self, x):
    return conv2d_same(
        x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
    )
"""
"""The forward of timm's ``Conv2dSame``."""


def _convolve_same(layer: Any, x: Tensor) -> Any:
    sizes: list[int] = []
    kernel_size = layer.weight.shape[-2:]  # the layer may be made with another one
    for d in (1, 0):
        size, stride = x.shape[d - 2], layer.stride[d]
        reach = layer.dilation[d] * (kernel_size[d] - 1) + 1
        both = max((-(-size // stride) - 1) * stride + reach - size, 0)
        sizes += [both // 2, both - both // 2]
    return convolved(layer, x, sizes)


_KNOWN: Mapping[str, Forward] = {_CAUSAL: _convolve_causal, _SAME: _convolve_same}
"""Texts of forwards -> functions of the layer and its inputs, which return NotImplemented for calls
that the forward has to compute."""
_READ: Mapping[str, Any] = {
    "torch": torch,
    "F": F,
    "math": math,
    "conv2d_same": """
def conv2d_same(x, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    x = pad_same(x, weight.shape[-2:], stride, dilation)
    return F.conv2d(x, weight, bias, stride, (0, 0), dilation, groups)
""",
    "pad_same": """
def pad_same(x, kernel_size, stride, dilation=(1, 1), value=0):
    ih, iw = x.size()[-2:]
    pad_h = get_same_padding(ih, kernel_size[0], stride[0], dilation[0])
    pad_w = get_same_padding(iw, kernel_size[1], stride[1], dilation[1])
    x = F.pad(x, (pad_w // 2, pad_w - pad_w // 2, pad_h // 2, pad_h - pad_h // 2), value=value)
    return x
""",
    "get_same_padding": """
def get_same_padding(x, kernel_size, stride, dilation):
    if isinstance(x, torch.Tensor):
        return torch.clamp(
            ((x / stride).ceil() - 1) * stride + (kernel_size - 1) * dilation + 1 - x, min=0
        )
    else:
        return max(
            (math.ceil(x / stride) - 1) * stride + (kernel_size - 1) * dilation + 1 - x, 0
        )
""",
}
"""Global names that the forwards read -> what they must be: modules, and texts of functions."""


def _reads(function: Any, text: str) -> bool:
    """Returns whether a function has this text, and its global names what is known of them."""
    if not isinstance(function, FunctionType) or _source(function) != _normal(text):
        return False
    for name in _READ.keys() & set(function.__code__.co_names):
        expected, found = _READ[name], function.__globals__.get(name)
        is_known = _reads(found, expected) if isinstance(expected, str) else found is expected
        if not is_known:
            return False
    return True


def _source(function: FunctionType) -> str | None:
    """Returns the text of a function, and not of one that it wraps; None if it is not known."""
    try:
        return _normal(inspect.getsource(function.__code__))
    except (OSError, TypeError, SyntaxError):
        return None


def _normal(text: str) -> str:
    """Returns a function's text without comments, annotations and docstring."""
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                del node.body[0]
    return ast.unparse(tree)
