"""What the rewrites share: the inner problem's engines, and the recipe around one of them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cudnn_autotune.core.extension import require_cuda_build
from cudnn_autotune.engines.configs import Candidate, Device, open_search, query
from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.kernels import sources
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Buffer, EngineLaunch, KernelLaunch, Recipe
from cudnn_autotune.engines.rewrites.packing import SOURCE, Copy, Packing, pack, unpack

MOST_OFFERS = 4
"""Of a rewrite, for one problem."""
_ALIGNMENT = 256
"""Of tensors in the workspace, in bytes; torch aligns the workspace itself so."""
_WRITTEN: Mapping[str, Buffer] = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
_MOST_ALIGNED = 32
"""The most that a problem says of a tensor's alignment, in bytes."""


@dataclass(frozen=True)
class Form:
    """A problem in another form: an inner problem, for which some tensors are packed.

    Operands are packed into the workspace before an engine solves the inner problem, and a result
    is unpacked behind it. It holds in the directions for which the rewrite returns it.
    """

    inner: ConvProblem
    packings: Mapping[Buffer, Packing]
    """Of the tensors that are not used as they are."""
    parameters: str = ""
    """What tells it from the problem's other forms, such as ``C=8``."""


class Rewrite(ABC):
    """An implementation that solves a problem by an engine of cuDNN for another problem.

    Settings are the text of the inner problem's engine, after the form's parameters and a ``/``
    where a form has any: ``C=8/eng67:KERNEL_CFG=3``.
    """

    name: str
    """Also that of the module, whose text is part of the version."""

    def __init__(self) -> None:
        package = __package__ or ""
        files = ("packing.py", "rewrite.py", f"{self.name}.py")
        self.version = sources.version(SOURCE, *(sources.text(f, package) for f in files))

    @abstractmethod
    def forms(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Form]:
        """Returns the forms of a problem that may be faster, the best guess first.

        Raises:
            ValueError: a tensor of an inner problem is too large for cuDNN.
        """

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        """Returns each form's engines that cuDNN's heuristic mode A ranks first."""
        return _offers(self, problem, gpu)

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        if settings not in (offer.settings for offer in self.offers(problem, gpu)):
            raise ValueError(
                f"settings must be one that {self.name} offers for {problem.text}, got {settings!r}"
            )
        parameters, slash, engine_text = settings.partition("/")
        if not slash:
            parameters, engine_text = "", settings
        form = next(f for f in self.forms(problem, gpu) if f.parameters == parameters)
        return _recipe(problem, form, engine_text)


@functools.lru_cache(maxsize=1024)
def _offers(rewrite: Rewrite, problem: ConvProblem, gpu: Gpu) -> tuple[Offer, ...]:
    """A query of engines takes some 3 ms, so what comes of it is kept."""
    if gpu.device is None or problem.dtype is torch.float64:
        return ()
    try:
        forms = rewrite.forms(problem, gpu)
    except ValueError:
        return ()
    # Three engines of one form, two of each of two forms, one of each of more.
    each = -(-(MOST_OFFERS - 1) // max(1, len(forms)))
    found = [
        _offer(problem, form, engine)
        for form in forms
        for engine in _engines(form.inner, gpu.device)[:each]
    ]
    return tuple(found[:MOST_OFFERS])


def _offer(problem: ConvProblem, form: Form, engine: Candidate) -> Offer:
    own = _recipe(problem, form, engine.text).workspace_bytes
    compiled = "RUNTIME_COMPILATION"
    return Offer(
        settings=f"{form.parameters}/{engine.text}" if form.parameters else engine.text,
        workspace_bytes=own + engine.workspace_bytes,
        numerical_notes=engine.numerical_notes,
        behavior_notes=(*(n for n in engine.behavior_notes if n != compiled), compiled),
    )


def _recipe(problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
    inner, written = form.inner, _WRITTEN[problem.op]
    places: dict[Buffer, Address] = {name: Address(name) for name in _buffers(problem)}
    aligned = dict(zip(("x", "w", "y"), problem.alignment, strict=True))
    copies: dict[Buffer, Copy] = {}
    used = 0
    for name, packing in form.packings.items():
        packed = Address("workspace", used)
        alignment = aligned.get(name, _MOST_ALIGNED)
        copies[name] = Copy(packing, places[name], packed, alignment)
        places[name] = packed
        used += -(-packing.packed_count * inner.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    launches: list[KernelLaunch | EngineLaunch] = []
    operands = [copy for name, copy in copies.items() if name != written]
    if operands:
        launches.append(pack(operands, inner.dtype))
    launches.append(EngineLaunch(inner, engine_text, **places))
    if written in copies:
        launches.append(unpack([copies[written]], inner.dtype))
    return Recipe(tuple(launches), used)


def _buffers(problem: ConvProblem) -> list[Buffer]:
    names: list[Buffer] = ["x", "w", "y"]
    if problem.bias:
        names.append("bias")
    if problem.residual:
        names.append("residual")
    return names


def _engines(problem: ConvProblem, device: Device) -> list[Candidate]:
    """Returns the first config of each family in mode A, the best guess first."""
    try:
        listed = query(open_search(problem, device), problem, ["A"])
    except require_cuda_build().CudnnError:  # cuDNN has no graph for it
        return []
    families: dict[tuple[object, ...], Candidate] = {}
    for candidate in listed:
        if not candidate.is_unfused:
            families.setdefault(candidate.config_family, candidate)
    return list(families.values())


def inner_problem(
    problem: ConvProblem, packings: Mapping[Buffer, Packing], **changes: object
) -> ConvProblem:
    """Returns a problem with changes. The tensors that are packed lie in the workspace, and so they
    are aligned.

    Raises:
        ValueError: as :class:`ConvProblem`.
    """
    alignment = tuple(
        _MOST_ALIGNED if name in packings else given
        for name, given in zip(("x", "w", "y"), problem.alignment, strict=True)
    )
    return replace(problem, alignment=alignment, **changes)  # type: ignore[arg-type]


def channel_granule(problem: ConvProblem, gpu: Gpu) -> int:
    """Returns the number of channels of which tensor cores want a multiple; 0 if the problem may
    not use them on this GPU."""
    if problem.dtype in (torch.float16, torch.bfloat16):
        least = (8, 0) if problem.dtype is torch.bfloat16 else (7, 0)
        return 8 if gpu.compute_capability >= least else 0
    is_tf32 = problem.dtype is torch.float32 and problem.allow_tf32
    return 4 if is_tf32 and gpu.compute_capability >= (8, 0) else 0


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
