"""Implementations of convolutions beside cuDNN's engines, PyTorch's own path and cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Recipe

ISOLATED = "CUDNN_AUTOTUNE_ISOLATED"
"""Environment variable of a process that tries an implementation first
(``implementing.isolated_run``), and of its children. They offer no user's implementation: each try
would start the next process."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that implementations need. The GPU need not be here."""

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
    """This GPU for :func:`~cudnn_autotune.engines.configs.open_search`: the index of a CUDA device,
    or a property file. If it is None, rewrites to engines of cuDNN are not offered."""

    @property
    def sm_shared_bytes(self) -> int:
        """Bytes of shared memory of a multiprocessor; one block may have them all."""
        return self.shared_bytes + self.reserved_shared_bytes


@dataclass(frozen=True)
class Offer:
    """One way in which an implementation computes a problem."""

    settings: str
    """A text without blanks that is unique among the implementation's offers, such as
    ``ROWS=4,WARPS=8``. It may be empty."""
    workspace_bytes: int = 0
    numerical_notes: tuple[str, ...] = ()
    """Notes in cuDNN's words: ``NONDETERMINISTIC``, ``TENSOR_CORE``,
    ``REDUCED_PRECISION_REDUCTION``."""
    behavior_notes: tuple[str, ...] = ("RUNTIME_COMPILATION",)


class Implementation(Protocol):
    """A program for some convolutions. Its candidates compete with cuDNN's engines.

    Two attributes, if true, let it compute more problems:

    - ``takes_slices``: the input or output is a slice of the channels of a larger tensor
      (``ConvProblem.pixel_strides``);
    - ``takes_slope``: the activation is ``prelu``.
    """

    @property
    def name(self) -> str:
        """A unique identifier in lower case."""

    @property
    def version(self) -> str:
        """A text that changes with the implementation. Choices are kept under name and version."""

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        """Returns the offers for a problem, the best guess first; none if it does not compute it.
        It is called often and must be quick."""
        ...

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        """Returns the recipe of the offer with these settings.

        Raises:
            ValueError: there is no such offer.
        """
        ...
