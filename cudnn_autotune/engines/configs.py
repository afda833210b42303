"""The engine configs that cuDNN offers for a problem, on a GPU of this machine or on another."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import PathLike

import torch

from cudnn_autotune.core.extension import _C, require_cuda_build
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines import devices
from cudnn_autotune.engines.candidate_id import UNFUSED, CandidateId, identify, parse
from cudnn_autotune.engines.problem import ConvProblem, check_problem

HEURISTIC_MODES = ("A", "B", "FALLBACK")

# The knobs that name a config's tile or kernel.
_FAMILY_KNOBS = ("TILE_SIZE", "KERNEL_CFG")

_log = logging.getLogger(__name__)
_DRIVER = "libcuda.so.1"
Device = str | int | torch.device | PathLike[str]


@dataclass(frozen=True)
class Candidate:
    """A way to compute a problem: an engine config of cuDNN, PyTorch's own path, or an offer of an
    implementation."""

    engine: int | None
    """cuDNN's engine number; None if the candidate is no engine of cuDNN."""
    knobs: Mapping[str, int] = field(hash=False)
    """The engine's knobs and their values, by name."""
    workspace_bytes: int
    numerical_notes: tuple[str, ...]
    """cuDNN's notes on the output, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``."""
    behavior_notes: tuple[str, ...]
    """cuDNN's notes on the plan, such as ``RUNTIME_COMPILATION``."""
    text: str
    """The candidate as a text, from which :func:`build_plan` builds the same plan:
    ``eng67:KERNEL_CFG=3,WORKSPACE=0``, ``aten``, ``matmul``, or the ``name@version:settings`` of an
    implementation. It begins with ``unfused:`` if a kernel of PyTorch's adds the bias after an
    engine."""
    heuristic_mode: str
    """cuDNN's first heuristic mode that lists it, ``A``, ``B`` or ``FALLBACK``; else empty."""
    rank: int
    """Its place, from 0, in its query's result. :attr:`place` compares different queries'
    candidates."""

    @property
    def place(self) -> tuple[int, int]:
        """A key that sorts candidates as cuDNN's heuristics list them: A, B, FALLBACK, the rest."""
        mode = self.heuristic_mode
        behind = len(HEURISTIC_MODES)
        return HEURISTIC_MODES.index(mode) if mode in HEURISTIC_MODES else behind, self.rank

    @property
    def id(self) -> CandidateId:
        """The parts of the text."""
        return identify(self.text)

    @property
    def is_unfused(self) -> bool:
        """Whether a kernel of PyTorch's adds the bias after the engine."""
        return self.id.kind == "unfused"

    @property
    def engine_name(self) -> str:
        """The text without the knobs or settings: ``eng67``, ``unfused:eng67``, ``aten``,
        ``name@version``. cuDNN numbers the engines with a bias and those without one
        independently."""
        if self.engine is None:
            return self.id._replace(settings="").text
        return f"{UNFUSED if self.is_unfused else ''}eng{self.engine}"

    @property
    def is_compiled(self) -> bool:
        """Whether its plan is compiled at run time, which takes some 0.3 s on one core."""
        return "RUNTIME_COMPILATION" in self.behavior_notes

    @property
    def config_family(self) -> tuple[object, ...]:
        """The engine and its tile or kernel. Configs of one family differ only in other knobs
        (clusters, splits, workspace), and their times differ by some percent, in a race and in
        sustained runs. A candidate without such a knob is its own family."""
        named = tuple(self.knobs.get(knob) for knob in _FAMILY_KNOBS)
        return (self.engine_name, *named) if any(k is not None for k in named) else (self.text,)

    @property
    def notes(self) -> tuple[str, ...]:
        """cuDNN's numerical and behaviour notes, without the prefix of its enums."""
        return self.numerical_notes + self.behavior_notes


OWN_PATH = Candidate(
    engine=None,
    knobs={},
    workspace_bytes=0,
    numerical_notes=(),
    behavior_notes=(),
    text="aten",
    heuristic_mode="",
    rank=2**31 - 1,
)
"""PyTorch's own path. It ranks behind every engine of cuDNN."""


def open_search(problem: ConvProblem, device: Device = "cuda") -> _C.EngineList:
    """Opens cuDNN's list of engines for ``problem`` on ``device`` (see
    :func:`~cudnn_autotune.engines.candidates.candidates`)."""
    check_problem(problem)
    extension = require_cuda_build()
    index = cuda_index(device)
    if index is not None:
        return extension.EngineList.on_device(problem.native(), index)
    assert isinstance(device, (str, PathLike))
    properties = devices.load(device)
    has_driver = _driver_is_found()
    try:
        return extension.EngineList.by_properties(problem.native(), properties)
    except ValueError as error:
        newer = ", ".join(devices.newer_fields_missing(properties))
        reasons = [f"its fields lack {newer}, which newer ones need"] if newer else []
        reasons += [] if has_driver else [f"{_DRIVER} is missing, which newer ones load"]
        raise ValueError("; ".join([str(error), *reasons])) from error


@cache
def _driver_is_found() -> bool:
    """Returns whether cuDNN can load the CUDA driver's library; logs it once if not."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        _log.warning(
            "%s is missing: for a GPU that is described by a property file cuDNN does not list the "
            "engines that it compiles at run time",
            _DRIVER,
        )
        return False
    return True


def cuda_index(device: Device) -> int | None:
    """Returns the index of a CUDA device; None where ``device`` names a property file.

    Raises:
        ValueError: ``device`` is no CUDA device of this machine, and names no property file.
    """
    if isinstance(device, str) and not (device == "cuda" or device.startswith("cuda:")):
        return None
    if isinstance(device, PathLike):
        return None
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _refusal(device) from error
    if wanted.type != "cuda":
        raise _refusal(device)
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if wanted.index is None and count else wanted.index or 0
    if index >= count:
        raise ValueError(
            f"device: {device!r} is not here (CUDA devices: {count}); for a GPU that is not here, "
            f"name one of {', '.join(devices.names())} or a path to a property file"
        )
    return index


def is_gpu_here(device: torch.device) -> bool:
    """Returns whether a tensor's device is a GPU of this machine. A fake tensor's need not be."""
    return device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()


def _refusal(device: Device) -> ValueError:
    # This reads a folder for the names; each search that asks for an index would wait for it.
    return ValueError(
        f"device must be a CUDA device, {', '.join(devices.names())} or a path to a property "
        f"file, got {device!r}"
    )


def query(
    search: _C.EngineList,
    problem: ConvProblem,
    modes: Iterable[str] = HEURISTIC_MODES,
    *,
    workspace_limit: int | None = None,
    filtered: bool = True,
    known: Container[str] = (),
) -> list[Candidate]:
    """Asks heuristic modes for engine configs.

    Args:
        problem, workspace_limit, filtered: as of
            :func:`~cudnn_autotune.engines.candidates.candidates`.
        known: the texts of the candidates to leave out.
    """
    extension = require_cuda_build()
    native = problem.native()
    limit = -1 if workspace_limit is None else workspace_limit
    found = [c for mode in modes for c in search.query(mode)]
    kept = [
        c
        for c in found
        if (
            extension.is_allowed(c, native, limit)
            if filtered
            else limit < 0 or c.workspace_bytes <= limit
        )
        and c.text not in known
    ]
    return [_candidate(c, rank) for rank, c in enumerate(kept)]


def described(
    search: _C.EngineList,
    problem: ConvProblem,
    engine_text: str,
    rank: int,
    *,
    workspace_limit: int | None = None,
) -> Candidate | None:
    """Returns the candidate of a config's text as cuDNN describes it on this device. None if it
    does not exist, or if :func:`query` would leave it out."""
    extension = require_cuda_build()
    limit = -1 if workspace_limit is None else workspace_limit
    try:
        found = search.describe(engine_text)
    except extension.CudnnError:
        return None
    is_allowed = extension.is_allowed(found, problem.native(), limit)
    return _candidate(found, rank) if is_allowed else None


def _candidate(found: _C.Candidate, rank: int) -> Candidate:
    return Candidate(
        engine=found.engine,
        knobs=found.knobs,
        workspace_bytes=found.workspace_bytes,
        numerical_notes=tuple(found.numerical_notes),
        behavior_notes=tuple(found.behavior_notes),
        text=found.text,
        heuristic_mode=found.heuristic_mode,
        rank=rank,
    )


def check_workspace_limit(
    workspace_limit: int | None, argument: str = "workspace_limit"
) -> int | None:
    """Returns the limit; raises ValueError naming ``argument`` unless it is bytes or None."""
    if workspace_limit is None:
        return None
    is_int = isinstance(workspace_limit, int) and not isinstance(workspace_limit, bool)
    if not is_int or not 0 <= workspace_limit < 2**63:
        raise ValueError(
            f"{argument} must be None or a number of bytes from 0 to 2**63 - 1, "
            f"got {workspace_limit!r}"
        )
    return workspace_limit


def build_plan(problem: ConvProblem, engine_text: str, device: Device = "cuda") -> _C.Plan:
    """Builds the plan of a candidate.

    Args:
        problem: the convolution.
        engine_text: as :attr:`Candidate.text`.
        device: as of :func:`~cudnn_autotune.engines.candidates.candidates`; for an implementation's
            offer, a CUDA device.

    Returns:
        A plan with ``.text`` and ``.workspace_bytes``.

    Raises:
        TypeError: ``problem`` is not a ConvProblem, or ``engine_text`` is not a str.
        ValueError: ``engine_text`` does not parse, or the device is unknown.
        PlanError: the candidate does not exist for the problem, or does not build.
    """
    check_problem(problem)
    check_engine_text(engine_text)
    extension = require_cuda_build()
    named = identify(engine_text)
    if named.is_implementation:
        parse(engine_text)
    elif named.is_engine:
        extension.parse_engine_text(engine_text)
    return open_search(problem, device).build(engine_text)


def check_engine_text(text: object, argument: str = "engine_text") -> None:
    """Raises TypeError naming ``argument`` where it is not a str."""
    if not isinstance(text, str):
        raise TypeError(f"{argument} must be a text, got {shown(text)}")


def parse_engine_text(text: str) -> tuple[int, dict[str, int]]:
    """Parses ``"eng67:KERNEL_CFG=3"`` or ``"unfused:eng67:KERNEL_CFG=3"`` to
    ``(67, {"KERNEL_CFG": 3})``.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: ``text`` does not parse.
    """
    check_engine_text(text, "text")
    engine, knobs = require_cuda_build().parse_engine_text(text)
    return engine, dict(knobs)


def engine_text(engine: int, knobs: Mapping[str, int]) -> str:
    """Writes ``(67, {"KERNEL_CFG": 3})`` as ``"eng67:KERNEL_CFG=3"``, with sorted knobs.

    Raises:
        TypeError: ``engine`` is not an int, or ``knobs`` is not a mapping of names to ints.
        ValueError: a knob's name is unknown.
    """
    if not isinstance(engine, int) or isinstance(engine, bool):
        raise TypeError(f"engine must be an int, got {shown(engine)}")
    if not isinstance(knobs, Mapping) or not all(
        isinstance(name, str) and isinstance(value, int) for name, value in knobs.items()
    ):
        raise TypeError(f"knobs must be a mapping of names to ints, got {shown(knobs)}")
    return str(require_cuda_build().engine_text(engine, dict(knobs)))
