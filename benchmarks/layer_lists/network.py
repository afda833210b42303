"""A network, and how its layers are read off it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Nothing needs the gradient of images, nor that of the latents that a diffusion model is given.
FIRST = ("fprop", "wgrad")
ALSO = ["bfloat16", "float32"]
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True)
class Wanted:
    """A layer to list: its name here, the module's name in the model, the batch."""

    name: str
    module: str
    batch: int
    also: bool = False
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    title: str
    library: str
    build: Callable[[], torch.nn.Module]
    size: tuple[int, ...]
    """Of one input, with its channels."""
    wanted: Sequence[Wanted]
    forward: Callable[[torch.nn.Module, torch.Tensor], Any] = torch.nn.Module.__call__

    @property
    def version(self) -> str:
        version: str = importlib.import_module(self.library).__version__
        return version


def entry(name: str, source: str, shapes: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    """A layer as the lists have it: what is at its default is left out."""
    written = {"name": name, "source": source}
    written |= {"input_shape": list(shapes[0]), "weight_shape": list(shapes[1])}
    for field, default in DEFAULTS.items():
        value = more[field]
        if isinstance(value, tuple):
            value = value[0] if len(set(value)) == 1 else list(value)
        if value != default:
            written[field] = value
    if more["also"]:
        written["also"] = ALSO
    if more["ops"]:
        written["ops"] = list(more["ops"])
    return written


def measured(network: Network) -> Iterator[dict[str, Any]]:
    """The network's layers, each from a run of the whole network at its batch size."""
    with torch.device("meta"):
        model = network.build().eval()
    modules = dict(model.named_modules())
    for wanted in network.wanted:
        module = modules[wanted.module]
        seen: list[torch.Tensor] = []
        handle = module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.extend(inputs))
        with torch.device("meta"), torch.no_grad():
            network.forward(model, torch.empty(wanted.batch, *network.size))
        handle.remove()
        size = "x".join(map(str, network.size[1:]))
        size += " latents" if network.library == "diffusers" else ""
        yield entry(
            wanted.name,
            f"{network.title}, {network.library} {network.version.split('+')[0]}, {size}, batch "
            f"{wanted.batch}: {wanted.module}",
            (seen[0].shape, module.weight.shape),
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            also=wanted.also,
            ops=wanted.ops,
        )
