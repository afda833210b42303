"""The base of all rewrites: the inner problem's engines, and the recipe around one of them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.core.extension import require_cuda_build
from cudnn_autotune.engines.configs import Candidate, open_search, query
from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import (
    RESULTS,
    Address,
    Buffer,
    EngineLaunch,
    KernelLaunch,
    Recipe,
    workspace_room,
)
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.rewrites.packing import LEAST_ALIGNED, Copy, Packing, pack, unpack

MOST_OFFERS = 3
"""Most offers of a rewrite for one problem."""
_COMPILED = "RUNTIME_COMPILATION"


@dataclass(frozen=True)
class Form:
    """A problem in another form: an inner problem with some packed tensors.

    Operands are packed into the workspace before an engine solves the inner problem, and a result
    is unpacked behind it.
    """

    inner: ConvProblem
    packings: Mapping[Buffer, Packing]
    """Packings of the tensors that need one."""


class Rewrite(ABC):
    """An implementation by an engine of cuDNN for another problem.

    Settings are the text of the inner problem's engine.
    """

    name: str
    modes: Sequence[str] = ("A",)
    """The heuristic modes of cuDNN whose engines are offered."""
    note: str = ""
    """The required numerical note of an engine; empty for any engine."""

    def __init__(self) -> None:
        self.version = sources.version_of(type(self).__module__)

    @abstractmethod
    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a problem's other form; None if it would not be faster.

        Raises:
            ValueError: a tensor of the inner problem is too large for cuDNN.
        """

    def build(self, problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
        """Returns the launches of an engine of the inner problem, with launches that pack its
        operands and unpack its result."""
        inner, written = form.inner, RESULTS[problem.op]
        places: dict[Buffer, Address] = {name: Address(name) for name in _buffers(problem)}
        copies: dict[Buffer, Copy] = {}
        used = 0
        for name, packing in form.packings.items():
            packed = Address("workspace", used)
            copies[name] = Copy(packing, places[name], packed)
            places[name] = packed
            used += workspace_room(packing.packed_count * inner.dtype.itemsize)
        launches: list[KernelLaunch | EngineLaunch] = []
        operands = [copy for name, copy in copies.items() if name != written]
        if operands:
            launches.append(pack(operands, inner.dtype))
        launches.append(EngineLaunch(inner, engine_text, **places))
        if written in copies:
            launches.append(unpack([copies[written]], inner.dtype))
        return Recipe(tuple(launches), used)

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        """Returns offers of the inner problem's engines that cuDNN's heuristics rank first."""
        return _offers(self, problem, gpu)

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        form = self.form(problem, gpu)
        if form is None or settings not in (o.settings for o in self.offers(problem, gpu)):
            raise ValueError(
                f"settings must be one that {self.name} offers for {problem.text}, got {settings!r}"
            )
        return self.build(problem, form, settings)


@functools.lru_cache(maxsize=1024)
def _offers(rewrite: Rewrite, problem: ConvProblem, gpu: Gpu) -> tuple[Offer, ...]:
    """Returns the offers. A query of engines takes some 3 ms, so its result is kept."""
    if gpu.device is None:
        return ()
    try:
        form = rewrite.form(problem, gpu)
    except ValueError:
        return ()
    # Some rewrites of less aligned tensors ended in "misaligned address" on an H200. The emulation
    # finds no such access of copy_tensors, so engines of cuDNN 9.19 remain as the cause.
    if form is None or (form.packings and min(problem.alignment) < LEAST_ALIGNED):
        return ()
    try:
        listed = query(open_search(form.inner, gpu.device), form.inner, rewrite.modes)
    except require_cuda_build().CudnnError:  # cuDNN has no graph for it
        return ()
    best: dict[tuple[object, ...], Candidate] = {}  # config family -> its first engine
    for engine in listed:
        if not engine.is_unfused:
            best.setdefault(engine.config_family, engine)
    note = rewrite.note
    fitting = [one for one in best.values() if not note or note in one.numerical_notes]
    return tuple(
        Offer(
            settings=engine.text,
            workspace_bytes=rewrite.build(problem, form, engine.text).workspace_bytes
            + engine.workspace_bytes,
            numerical_notes=engine.numerical_notes,
            # The kernels around the engine are compiled.
            behavior_notes=(*(n for n in engine.behavior_notes if n != _COMPILED), _COMPILED),
        )
        for engine in fitting[:MOST_OFFERS]
    )


def _buffers(problem: ConvProblem) -> list[Buffer]:
    names: list[Buffer] = ["x", "w", "y"]
    if problem.bias:
        names.append("bias")
    if problem.residual:
        names.append("residual")
    return names


def may_use_half(problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether tensor cores of this GPU take the problem's 16-bit operands."""
    least = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}.get(problem.dtype)
    return least is not None and gpu.compute_capability >= least


def may_use_tf32(problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether tensor cores of this GPU may round the problem's operands to TF32."""
    return problem.may_use_tf32 and gpu.compute_capability >= (8, 0)


def is_channels_last(problem: ConvProblem) -> bool:
    return problem.memory_format != torch.contiguous_format


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
