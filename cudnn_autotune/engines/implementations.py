"""Implementations of convolutions beside cuDNN's engines, PyTorch's own path and cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Recipe

ISOLATED = "CUDNN_AUTOTUNE_ISOLATED"
"""Environment variable of a process that tries an implementation before another one runs it
(``implementing.isolated_run``), and of all processes that it starts. In them no user's
implementation is offered: to try it there would start the next process, and so on."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that implementations ask for. The GPU need not be here."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """Most bytes of shared memory that a block may ask for."""
    l2_bytes: int
    sm_threads: int
    """Most threads that a multiprocessor holds."""
    sm_registers: int
    """Registers of 32 bits of a multiprocessor."""
    reserved_shared_bytes: int
    """Bytes of shared memory that CUDA keeps for itself in each block."""
    device: int | str | PathLike[str] | None = None
    """The name of this GPU for :func:`~cudnn_autotune.engines.configs.open_search`: the index of a
    CUDA device, or a property file. If it is None, nothing that runs engines of cuDNN is
    offered."""

    @property
    def sm_shared_bytes(self) -> int:
        """Bytes of shared memory of a multiprocessor, which one block may have all of."""
        return self.shared_bytes + self.reserved_shared_bytes


@dataclass(frozen=True)
class Offer:
    """One way in which an implementation computes a problem."""

    settings: str
    """The text that tells it from the implementation's others, such as ``ROWS=4,WARPS=8``; may be
    empty. It has no blanks."""
    workspace_bytes: int = 0
    numerical_notes: tuple[str, ...] = ()
    """Notes in cuDNN's words: ``NONDETERMINISTIC``, ``TENSOR_CORE``,
    ``REDUCED_PRECISION_REDUCTION``."""
    behavior_notes: tuple[str, ...] = ("RUNTIME_COMPILATION",)


class Implementation(Protocol):
    """Computes some convolutions. Its candidates compete with cuDNN's engines.

    One that has a true attribute ``takes_slices`` is also asked for problems whose input or output
    is a slice of the channels of a larger tensor (``ConvProblem.pixel_strides``), and one that has
    a true attribute ``takes_slope`` for those whose activation is ``prelu``.
    """

    @property
    def name(self) -> str:
        """An identifier in lower case, which no other implementation has."""

    @property
    def version(self) -> str:
        """Changes whenever the implementation does. Choices are remembered under both."""

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        """Returns the ways in which it computes the problem, the best guess first; none if it does
        not compute it. Called often, so it must be quick."""
        ...

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        """Returns what computes the problem with the settings of one of its offers.

        Raises:
            ValueError: it offers no such settings.
        """
        ...
