"""A kernel family: one implementation's tilings, the GPUs that have its instructions, and how many
of its blocks a multiprocessor holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Recipe

INT32_MAX = 2**31 - 1
MMA_CAPABILITY = (8, 0)
"""The first compute capability with cp.async, and with mma of bfloat16 and TF32."""


class Tiling(Protocol):
    """A division of a problem among blocks, warps and threads."""

    @property
    def settings(self) -> str:
        """The text by which the tiling is offered and remembered."""


AnyTiling = TypeVar("AnyTiling", bound=Tiling)


class KernelFamily(ABC, Generic[AnyTiling]):
    """A kernel with all tilings in which it is launched."""

    name: ClassVar[str]
    version: ClassVar[str]
    min_capability: ClassVar[tuple[int, int]] = MMA_CAPABILITY
    """The first compute capability that has the kernel's instructions."""
    numerical_notes: ClassVar[tuple[str, ...]] = ("TENSOR_CORE",)

    @abstractmethod
    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[AnyTiling]:
        """Returns the tilings worth a measurement on a GPU that has the kernel's instructions, the
        best guess first; none if the kernel does not compute the problem."""

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
            for t in self._offered(problem, gpu)
        ]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        """Returns the launches of the tiling with these settings.

        Raises:
            ValueError: no tiling that is offered has these settings.
        """
        offered = self._offered(problem, gpu)
        for tiling in offered:
            if tiling.settings == settings:
                return self.build(problem, tiling, gpu)
        allowed = " or ".join(t.settings for t in offered) or "none"
        raise ValueError(
            f"settings: {self.name} does not offer {settings!r} for {problem.text}; allowed are "
            f"{allowed}"
        )

    def _offered(self, problem: ConvProblem, gpu: Gpu) -> Sequence[AnyTiling]:
        return () if gpu.compute_capability < self.min_capability else self.tilings(problem, gpu)


def occupancy(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> int:
    """Returns the blocks that a multiprocessor holds at a time.

    Args:
        threads: threads of a block.
        registers: registers of a thread, which are allotted in eights.
        shared_bytes: dynamic shared memory of a block.
    """
    whole_warps = -(-threads // 32) * 32
    return min(
        gpu.sm_registers // (whole_warps * -(-registers // 8) * 8),
        gpu.sm_threads // whole_warps,
        gpu.sm_shared_bytes // max(1, shared_bytes + gpu.reserved_shared_bytes),
    )
