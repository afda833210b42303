"""Implementations of tests' own, and their registration for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cudnn_autotune import ConvProblem
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.implementations import Gpu, Implementation, Offer
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe

EMPTY = 'extern "C" __global__ void empty(float* y) {}'
"""The source of a kernel that writes nothing."""


@dataclass(frozen=True)
class Fixed:
    """Makes the same offers for every problem."""

    name: str = "fixed"
    version: str = "1"
    given: tuple[Offer, ...] = (Offer("ROWS=4"), Offer("ROWS=8"))
    error: Exception | None = None

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        if self.error is not None:
            raise self.error
        return self.given

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        return Recipe(())


@dataclass(frozen=True)
class Written:
    """Launches one kernel for every problem, in a workspace of 512 bytes."""

    source: str
    function: str = "empty"
    name: str = "written"
    version: str = "1"

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        return (Offer("", workspace_bytes=512),)

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        kernel = Kernel(self.source, self.function)
        return Recipe((KernelLaunch(kernel, (1, 1, 1), (32, 1, 1), (Address("y"),)),), 512)


@contextmanager
def registered(*wanted: Implementation) -> Iterator[None]:
    """Within the context these are registered, and no others."""
    others = registry.registered()
    for one in others:
        registry.unregister(one.name)
    try:
        for one in wanted:
            registry.register(one)
        yield
    finally:
        for one in registry.registered():
            registry.unregister(one.name)
        for one in others:
            registry.register(one)
