"""Implementations of tests' own, and their registration for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cudnn_autotune import ConvProblem
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.implementations import Gpu, Implementation, Offer
from cudnn_autotune.engines.recipe import Recipe


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


@contextmanager
def registered(*implementations: Implementation) -> Iterator[None]:
    """Within the context these are registered, and no others."""
    others = registry.registered()
    for one in others:
        registry.unregister(one.name)
    try:
        for one in implementations:
            registry.register(one)
        yield
    finally:
        for one in registry.registered():
            registry.unregister(one.name)
        for one in others:
            registry.register(one)
