"""A kernel family: one implementation's tilings, and the GPUs with its instructions."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Int64, Recipe
from cudnn_autotune.kernels.sources import activation_macros

INT32_MAX = 2**31 - 1
NULL = Int64(0)
"""A null pointer."""
MMA_CAPABILITY = (8, 0)
"""The first compute capability with cp.async, and with mma of bfloat16 and TF32."""


class Tiling(Protocol):
    """A division of a problem among blocks, warps and threads."""

    @property
    def settings(self) -> str:
        """The text of the tiling in offers and choices."""


AnyTiling = TypeVar("AnyTiling", bound=Tiling)


class KernelFamily(ABC, Generic[AnyTiling]):
    """A kernel with all its tilings."""

    name: ClassVar[str]
    version: ClassVar[str]
    min_capability: ClassVar[tuple[int, int]] = MMA_CAPABILITY
    """The first compute capability that has the kernel's instructions."""
    numerical_notes: ClassVar[tuple[str, ...]] = ("TENSOR_CORE",)
    takes_slices: ClassVar[bool] = False
    """Whether the input and the output of fprop may be slices of larger tensors."""
    takes_slope: ClassVar[bool] = False
    """Whether the activation may be PReLU."""

    @abstractmethod
    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[AnyTiling]:
        """Returns the tilings worth a measurement on a GPU with the kernel's instructions, the best
        guess first; none if the kernel does not compute the problem."""

    @abstractmethod
    def build(self, problem: ConvProblem, tiling: AnyTiling, gpu: Gpu) -> Recipe:
        """Returns the launches of a tiling."""

    def workspace_bytes(self, problem: ConvProblem, tiling: AnyTiling, gpu: Gpu) -> int:
        """Returns the bytes of workspace that a tiling needs."""
        return 0

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        """Returns the tilings as offers, the best guess first."""
        return [
            Offer(t.settings, self.workspace_bytes(problem, t, gpu), self.numerical_notes)
            for t in _tilings(self, problem, gpu)
        ]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        """Returns the launches of the tiling with these settings.

        Raises:
            ValueError: no offered tiling has these settings.
        """
        offered = _tilings(self, problem, gpu)
        for tiling in offered:
            if tiling.settings == settings:
                return self.build(problem, tiling, gpu)
        allowed = " or ".join(t.settings for t in offered) or "none"
        raise ValueError(
            f"settings: {self.name} does not offer {settings!r} for {problem.text}; allowed are "
            f"{allowed}"
        )


@functools.lru_cache(maxsize=2048)
def _tilings(family: KernelFamily[Any], problem: ConvProblem, gpu: Gpu) -> tuple[Any, ...]:
    """Returns the tilings; none on a GPU without the kernel's instructions. Planning takes
    milliseconds, and a search calls it several times."""
    is_older = gpu.compute_capability < family.min_capability
    return () if is_older else tuple(family.tilings(problem, gpu))


def operands(problem: ConvProblem) -> tuple[Address, Address, Address]:
    """Returns the input of a fprop or dgrad, the weight, and the result."""
    x, w, y = Address("x"), Address("w"), Address("y")
    return (y, w, x) if problem.op == "dgrad" else (x, w, y)


def addends(problem: ConvProblem) -> tuple[Address | Int64, Address | Int64]:
    """Returns the bias and the residual; null pointers for missing ones."""
    return (
        Address("bias") if problem.bias else NULL,
        Address("residual") if problem.residual else NULL,
    )


def slope(problem: ConvProblem) -> Address | Int64:
    """Returns the slopes of PReLU; a null pointer for other activations."""
    return Address("slope") if problem.has_slope else NULL


def epilogue_macros(problem: ConvProblem) -> tuple[tuple[str, str | int], ...]:
    """Returns the macros of a kernel's epilogue."""
    return (
        ("HAS_BIAS", int(problem.bias)),
        ("HAS_RESIDUAL", int(problem.residual)),
        *activation_macros(problem.activation),
    )
