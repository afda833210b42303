"""Random convolutions whose layouts can be read in two ways, and what ATen makes of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Case:
    """One call of a function of ``torch.nn.functional``, and the gradient of its output."""

    name: str
    function: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    keywords: dict[str, Any]
    grad_layout: str
    wanted: tuple[bool, bool]
    """Whether the gradients of the input and of the weight are wanted."""

    def to(self, device: str, dtype: torch.dtype) -> Case:
        return Case(
            self.name,
            self.function,
            placed(self.input, device, dtype),
            placed(self.weight, device, dtype),
            None if self.bias is None else self.bias.to(device, dtype),
            self.keywords,
            self.grad_layout,
            self.wanted,
        )

    def step(self, functions: Any = F) -> tuple[Tensor, list[Tensor]]:
        """The output, and the gradients of what they are wanted of and of the bias."""
        x = self.input.detach().requires_grad_(self.wanted[0])
        w = self.weight.detach().requires_grad_(self.wanted[1])
        b = None if self.bias is None else self.bias.detach().requires_grad_()
        y = getattr(functions, self.function)(x, w, b, **self.keywords)
        leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
        return y, list(torch.autograd.grad(y, leaves, self.gradient(y)))

    def gradient(self, y: Tensor) -> Tensor:
        """A gradient of the output, whose values depend on its shape only."""
        values = torch.arange(y.numel(), dtype=torch.float64).sin().reshape(y.shape)
        values = values.to(y.device, y.dtype)
        if self.grad_layout == "expanded":
            return values.flatten()[:1].reshape([1] * y.dim()).expand(y.shape)
        return laid_out(values, self.grad_layout)


def placed(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """A copy with the same strides, also where they leave gaps."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((size,), (1,)).to(device, dtype)
    return memory.as_strided(tensor.shape, tensor.stride())


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The values in a layout: ``first``, ``last``, ``gaps in channels``, ``gaps in columns``,
    ``last of gaps``, ``ones`` (strides of dimensions of size 1 are 1) or ``large`` (they are
    large)."""
    last = LAST.get(tensor.dim())
    if layout == "last":
        if last is None:  # as channels_last of images of height 1
            return tensor.unsqueeze(2).contiguous(memory_format=LAST[4]).squeeze(2)
        # contiguous() would leave what can be read as channels_last already
        return torch.empty_like(tensor, memory_format=last).copy_(tensor)
    if layout.startswith("gaps") or layout == "last of gaps":
        dim = tensor.dim() - 1 if layout == "gaps in columns" else 1
        wide = list(tensor.shape)
        wide[dim] *= 2
        memory = torch.zeros(wide, dtype=tensor.dtype, device=tensor.device)
        if layout == "last of gaps":
            memory = laid_out(memory, "last")
        view = memory[(*[slice(None)] * dim, slice(None, None, 2))]
        return view.copy_(tensor)
    if layout in ("ones", "large"):
        other = 1 if layout == "ones" else 4096
        dense = tensor.contiguous()
        strides = [other if n == 1 else s for n, s in zip(dense.shape, dense.stride(), strict=True)]
        return dense.as_strided(dense.shape, strides)
    return tensor.contiguous()


LAYOUTS = (
    *("first", "first", "last", "last", "gaps in channels", "gaps in columns", "last of gaps"),
    *("ones", "large"),
)


def draw(count: int, seed: int) -> list[Case]:
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    found: list[Case] = []
    while len(found) < count:
        dims = source.choice((1, 1, 2, 2, 3))
        transposed = source.random() < 0.3
        groups = source.choice((1, 1, 1, 2))
        channels, filters = (groups * source.choice((1, 1, 2, 8)) for _ in range(2))
        size = [source.choice((1, 1, 4, 7)) for _ in range(dims)]
        kernel = [source.choice((1, 1, 3)) for _ in range(dims)]
        padding = [k // 2 for k in kernel]
        stride = source.choice((1, 1, 2))
        parts = (channels, filters // groups) if transposed else (filters, channels // groups)
        layouts = [source.choice(LAYOUTS) for _ in range(3)]
        shape = (source.choice((1, 2, 4)), channels, *size)
        if math.prod(shape[1:]) == 1:
            layouts[0] = "first"  # ATen copies a view of such images, and forgets its layout
        keywords: dict[str, Any] = {"stride": stride, "padding": tuple(padding), "groups": groups}
        x = laid_out(torch.randn(shape, generator=generator), layouts[0])
        w = laid_out(torch.randn((*parts, *kernel), generator=generator), layouts[1])
        bias = torch.randn(filters, generator=generator) if source.random() < 0.5 else None
        function = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
        name = (
            f"{function} {tuple(x.shape)}@{x.stride()} * {tuple(w.shape)}@{w.stride()}, stride "
            f"{stride}, groups {groups}, gradient {layouts[2]}"
        )
        grad_layout = source.choice((layouts[2], layouts[2], "expanded"))
        wanted = source.choice(((True, True), (True, True), (True, False), (False, True)))
        found.append(Case(name, function, x, w, bias, keywords, grad_layout, wanted))
    return found


def suggested(tensor: Tensor) -> torch.memory_format:
    return torch._prims_common.suggest_memory_format(tensor)


def to(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """As ATen's ``tensor.to(layout)``."""
    if suggested(tensor) == layout:
        return tensor
    return torch.empty_like(tensor, memory_format=layout).copy_(tensor)


def strides_on_cuda(case: Case, output_size: torch.Size) -> tuple[tuple[int, ...], ...]:
    """The strides of the output, and of the gradients of input and weight, step by step as ATen's
    Convolution.cpp and cudnn/ConvShared.cpp come to them."""
    x, w = case.input, case.weight
    g = case.gradient(torch.empty(output_size, dtype=x.dtype))
    is_flat = w.dim() == 3
    is_double = x.dtype == torch.float64
    if is_flat:
        x, w, g = x.contiguous().unsqueeze(2), w.unsqueeze(2), g.unsqueeze(2)

    def layout_of(a: Tensor, b: Tensor) -> torch.memory_format:
        last = LAST[a.dim()]
        is_last = last in (suggested(a), suggested(b)) and not is_double
        return last if is_last else torch.contiguous_format

    def strides(size: torch.Size, layout: torch.memory_format) -> tuple[int, ...]:
        found = torch.empty(size, memory_format=layout).stride()
        return (*found[:2], *found[3:]) if is_flat else found

    # forward
    layout = layout_of(x, w)
    inside = x.contiguous(memory_format=layout)
    of_output = strides(g.shape, layout_of(inside, w))
    # backward
    x = x.contiguous(memory_format=layout) if case.wanted[1] else x
    if "transpose" in case.function:
        g = g.contiguous(memory_format=suggested(x))
    else:
        g = to(g, suggested(x))
    return of_output, strides(x.shape, layout_of(g, w)), strides(w.shape, layout_of(x, g))
