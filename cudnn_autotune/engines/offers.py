"""The registered implementations' offers for a problem, on a GPU that need not be here."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from cudnn_autotune.engines import devices, registry
from cudnn_autotune.engines.candidate_id import (
    check_settings,
    identify,
    of_implementation,
    parse,
)
from cudnn_autotune.engines.compiled_kernels import is_found
from cudnn_autotune.engines.configs import Candidate, Device, cuda_index
from cudnn_autotune.engines.implementations import Gpu, Implementation, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Recipe
from cudnn_autotune.engines.registry import ImplementationError

_log = logging.getLogger(__name__)
_FIRST_RANK = 20_000
"""A rank behind every engine of cuDNN."""
_reported: set[str] = set()


def gpu_of(device: Device) -> Gpu:
    """Describes a GPU that is here, or in a property file.

    Raises:
        ValueError: as :func:`~cudnn_autotune.engines.configs.cuda_index`.
    """
    index = cuda_index(device)
    if index is not None:
        return _gpu_here(index)
    assert not isinstance(device, (int, torch.device))
    given = json.loads(devices.load(device))
    return Gpu(
        compute_capability=divmod(given["deviceVer"] // 10, 10),
        multiprocessors=given["multiProcessorCount"],
        shared_bytes=given["maxSharedMemoryPerBlockOptin"],
        l2_bytes=given["l2CacheSize"],
        sm_threads=given["maxThreadsPerSM"],
        sm_registers=given["maxRegistersPerSM"],
        reserved_shared_bytes=given["reservedSharedMemoryPerBlock"],
        device=device,
    )


def _gpu_here(index: int) -> Gpu:
    given: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of these
    shared_bytes = given.shared_memory_per_block_optin
    return Gpu(
        compute_capability=(given.major, given.minor),
        multiprocessors=given.multi_processor_count,
        shared_bytes=shared_bytes,
        l2_bytes=given.L2_cache_size,
        sm_threads=given.max_threads_per_multi_processor,
        sm_registers=given.regs_per_multiprocessor,
        reserved_shared_bytes=given.shared_memory_per_multiprocessor - shared_bytes,
        device=index,
    )


def offers_of(
    problem: ConvProblem,
    gpu: Gpu,
    *,
    workspace_limit: int | None = None,
    filtered: bool = True,
) -> list[Candidate]:
    """Returns the candidates of all registered implementations, each one's best guess first.

    An implementation that fails to answer is left out, which is logged once.

    Args:
        problem, workspace_limit, filtered: as of
            :func:`~cudnn_autotune.engines.candidates.candidates`.
    """
    asked = problem if filtered else None
    found: dict[str, Candidate] = {}
    for implementation in registry.registered():
        for candidate in _candidates(implementation, problem, gpu, asked, workspace_limit):
            rank = _FIRST_RANK + len(found)
            found.setdefault(candidate.text, replace(candidate, rank=rank))
    return list(found.values())


def alike(text: str, problem: ConvProblem, gpu: Gpu) -> list[Candidate]:
    """Returns the candidates of the implementation that a text names, the same settings first. The
    list is empty if it is not registered in this version.

    Raises:
        ValueError: ``text`` does not parse.
    """
    try:
        implementation = registry.get(parse(text))
    except ImplementationError:
        return []
    found = _candidates(implementation, problem, gpu, problem, None)
    return sorted(found, key=lambda candidate: candidate.text != text)


def _offered(implementation: Implementation, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
    """Asks an implementation. A user's code may know neither slices nor slopes."""
    if problem.pixel_strides is not None and not getattr(implementation, "takes_slices", False):
        return ()
    if problem.has_slope and not getattr(implementation, "takes_slope", False):
        return ()
    try:
        offers = list(implementation.offers(problem, gpu))
        for offer in offers:
            check_settings(offer.settings)
    except Exception as error:
        asked = f"{implementation.name}@{implementation.version}"
        if asked not in _reported:
            _reported.add(asked)
            _log.warning(
                "%s is left out where it fails to say what it offers; first for %s: %s: %s",
                *(asked, problem.text, type(error).__name__, error),
            )
        return ()
    return offers


def is_allowed(offer: Offer, problem: ConvProblem | None, workspace_limit: int | None) -> bool:
    """Returns whether an offer may be used, by the filter of engine configs
    (csrc/core/cudnn/candidate.h). Without a problem only the workspace limit counts."""
    if workspace_limit is not None and offer.workspace_bytes > workspace_limit:
        return False
    if problem is None:
        return True
    refused = {"DOWN_CONVERT_INPUTS"}
    if problem.deterministic:
        refused.add("NONDETERMINISTIC")
    if problem.dtype == torch.float32 and not problem.allow_tf32:
        refused.add("TENSOR_CORE")
    if not problem.allow_reduced_precision:
        refused.add("REDUCED_PRECISION_REDUCTION")
    return refused.isdisjoint(offer.numerical_notes)


def _candidates(
    implementation: Implementation,
    problem: ConvProblem,
    gpu: Gpu,
    asked: ConvProblem | None,
    workspace_limit: int | None,
) -> Iterator[Candidate]:
    """Yields an implementation's offers that :func:`is_allowed` allows for ``asked``."""
    named = of_implementation(implementation.name, implementation.version)
    for rank, offer in enumerate(_offered(implementation, problem, gpu), _FIRST_RANK):
        if is_allowed(offer, asked, workspace_limit):
            yield Candidate(
                engine=None,
                knobs={},
                workspace_bytes=offer.workspace_bytes,
                numerical_notes=offer.numerical_notes,
                behavior_notes=offer.behavior_notes,
                text=named._replace(settings=offer.settings).text,
                heuristic_mode="",
                rank=rank,
            )


def described(text: str, problem: ConvProblem, gpu: Gpu) -> Offer:
    """Returns the offer that a candidate's text names.

    Raises:
        ValueError: ``text`` does not parse.
        ImplementationError: the implementation is not registered, or in another version, or does
            not offer these settings for the problem.
    """
    named = parse(text)
    for offer in _offered(registry.get(named), problem, gpu):
        if offer.settings == named.settings:
            return offer
    raise ImplementationError(f"{text}: it is not offered for {problem.text}")


def recipe_of(text: str, problem: ConvProblem, gpu: Gpu) -> Recipe:
    """Returns the recipe of the offered candidate that ``text`` names (:func:`described`).

    Raises:
        ValueError: ``text`` does not parse.
        ImplementationError: the implementation is not registered, or in another version, or fails
            to build.
    """
    named = parse(text)
    try:
        return registry.get(named).recipe(problem, named.settings, gpu)
    except Exception as error:  # a user's code
        # Only the text is kept: the error itself would keep the frames, and what they hold.
        raise ImplementationError(f"{text}: {type(error).__name__}: {error}") from None


def kernels_are_kept(text: str, problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether a candidate has only kernels of this package, all compiled by this process or
    an earlier one."""
    if not identify(text).is_implementation:
        return False
    try:
        kernels = recipe_of(text, problem, gpu).kernels
    except ImplementationError:
        return False
    return kernels is not None and all(is_found(one, gpu.compute_capability) for one in kernels)
