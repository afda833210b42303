"""Implementations of convolutions beside cuDNN's engines, PyTorch's own path and cuBLAS: what they
are, and those of this process by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.candidate_id import CandidateId, check_name, check_version, identify
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Recipe


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
    """Computes some convolutions. Its candidates compete with cuDNN's engines."""

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


_lock = ForkSafeLock()
_by_name: dict[str, Implementation] | None = None


class ImplementationError(RuntimeError):
    """An implementation is not here, in this version or with these settings, or does not build."""


def _registry() -> dict[str, Implementation]:
    """Returns the implementations by name. Those of the package are imported when somebody first
    asks, so that to import the package takes no longer for them."""
    global _by_name
    if _by_name is None:
        from cudnn_autotune.engines.built_in import BUILT_IN

        with _lock:
            if _by_name is None:  # no other thread was faster
                _by_name = {one.name: one for one in BUILT_IN}
    return _by_name


def register(implementation: Implementation) -> None:
    """Adds an implementation, behind those that are registered.

    Raises:
        ValueError: its name or version is not allowed, or another one has the name.
    """
    check_name(implementation.name)
    check_version(implementation.version)
    registry = _registry()
    with _lock:
        if implementation.name in registry:
            raise ValueError(f"name: an implementation {implementation.name!r} is registered")
        registry[implementation.name] = implementation


def unregister(name: str) -> Implementation:
    """Removes and returns an implementation; raises KeyError if there is none of this name."""
    registry = _registry()
    with _lock:
        if name not in registry:
            raise KeyError(f"no implementation {shown(name)} is registered")
        return registry.pop(name)


def registered() -> tuple[Implementation, ...]:
    """Returns all implementations, those of the package first, in the order of their
    registration."""
    registry = _registry()
    with _lock:
        return tuple(registry.values())


def find(name: str) -> Implementation | None:
    """Returns the implementation of this name, or None."""
    return _registry().get(name)


def get(named: CandidateId) -> Implementation:
    """Returns the implementation of a candidate.

    Raises:
        ImplementationError: it is not registered, or in another version.
    """
    found = find(named.name)
    if found is None:
        raise ImplementationError(f"{named.text}: no implementation {named.name!r} is registered")
    if found.version != named.version:
        raise ImplementationError(
            f"{named.text}: {named.name!r} is registered in version {found.version!r}"
        )
    return found


def is_absent(text: str) -> bool:
    """Returns whether a candidate is of an implementation that this process does not have in any
    version, such as one of another application."""
    named = identify(text)
    return named.is_implementation and find(named.name) is None
