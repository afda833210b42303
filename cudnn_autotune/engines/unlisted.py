"""Candidates that none of cuDNN's heuristics lists and that are worth timing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.candidate_id import UNFUSED
from cudnn_autotune.engines.configs import OWN_PATH, Candidate, engine_text
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import offers_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.registry import is_users
from cudnn_autotune.engines.roofline import bytes_moved

MATMUL = replace(OWN_PATH, text="matmul", rank=OWN_PATH.rank - 1)
"""A convolution as one matrix product, by cuBLAS: a 1x1 one over all pixels, or one whose kernel is
as large as the input."""

# cuDNN compiles these engines at run time and lists one kernel of each, but another is often
# faster. Each engine has a portfolio of KERNEL_CFG values that comes near the best of all of them
# (dgrad with 78, wgrad with 70; docs/findings/kernel-portfolio.md). ``auto`` compiles the first one
# only. The numbers belong to the version of cuDNN that is the outer key.
KERNEL_CFGS = {(9, 19): {78: (1, 0, 4, 8, 9, 20, 30, 40), 70: (0, 9)}}
_KNOB = "KERNEL_CFG"
# Engines that cuDNN compiles at run time, each with a number. With fewer filter elements for each
# pixel of the output than this number, the engine is hardly ever the fastest. Engine 71 (fprop) was
# on one of 92 layers. Engine 70 (wgrad) does not split the sum over the pixels, and below this
# number it took at least 1.46 times the best (docs/findings/fallback-mode.md). Engine 52 (fprop
# with a bias, residual or ReLU) was never the fastest in MobileNetV3 and HiFi-GAN, where the
# precompiled engines 39 and 41 do the same.
SELDOM_FASTEST = {(9, 19): {71: math.inf, 70: 100.0, 52: math.inf}}
# Engines that cuDNN compiles at run time and that hardly ever win with filters of one tap. The
# listed kernel of engine 78 (dgrad) gained 2 % on one of 15 such layers, and took at least 1.04
# times the best on the others (docs/findings/fallback-mode.md). The kernel that ``auto`` compiles
# was measured on one of them, and took 1.67 times the best.
NOT_FOR_ONE_TAP = {(9, 19): (78,)}
# Beyond this number of output channels of a group, and below this number of elements of a filter,
# cuDNN's engines for an activation are faster than ``implicit_gemm_1d`` on some layers of HiFi-GAN.
_MOST_NARROW = 64
_LEAST_ELEMENTS = 192
# A matrix product of fewer bytes takes about as long as a launch, with any engine. One of
# them took 6.5 us on an H200, engine 70 1.10 times as long and engine 78 1.28 times.
_SMALL_BYTES = 2**20

# PyTorch's default for torch.backends.cudnn.benchmark_limit.
MOST_BY_PYTORCH = 10

_KnownT = TypeVar("_KnownT")


def kernel_cfgs(cudnn_version: int) -> Mapping[int, tuple[int, ...]]:
    """Returns the portfolios for a version of cuDNN (91900: 9.19.0), KERNEL_CFG values by engine.

    They are those of the latest known version that is no later and of the same major version. A
    config that a later version lacks does not build there, and one that is no longer fast loses the
    race. For earlier versions and other major versions there are none.
    """
    return _known(KERNEL_CFGS, cudnn_version) or {}


def is_seldom_fastest(candidate: Candidate, problem: ConvProblem | None) -> bool:
    """Returns whether compiling a candidate mostly costs more than it gains, as known for the
    version of cuDNN (:func:`kernel_cfgs`). Candidates of mode A, which PyTorch compiles, do not
    count."""
    if not candidate.is_compiled or candidate.heuristic_mode == "A":
        return False
    if problem is not None and candidate.engine is not None and _is_small_product(problem):
        return True
    version = _cudnn_version()
    is_of_one_tap = problem is not None and math.prod(problem.weight_shape[2:]) == 1
    if is_of_one_tap and candidate.engine in (_known(NOT_FOR_ONE_TAP, version) or ()):
        return True
    least = (_known(SELDOM_FASTEST, version) or {}).get(candidate.engine or -1, 0.0)
    if problem is None or math.isinf(least):
        return math.isinf(least)
    pixels = problem.output_shape[0] * math.prod(problem.output_shape[2:])
    return math.prod(problem.weight_shape) < least * pixels


def timed_by_pytorch(problem: ConvProblem | None, listed: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates that PyTorch's benchmark mode times by default, without slow ones.

    PyTorch times the first ten of modes A and FALLBACK, in this order, and has no plan that adds a
    bias. For two-dimensional layers in ``channels_last`` without groups, mode FALLBACK was measured
    to be slow (docs/findings/fallback-mode.md). For these, and for unknown problems, the first ten
    of mode A are returned.

    Args:
        listed: candidates in the order of :meth:`Candidate.place`.
    """
    listed = list(listed)
    has_unfused = any(c.is_unfused for c in listed)
    own = [c for c in listed if c.is_unfused or not has_unfused]
    of_a = [c for c in own if c.heuristic_mode == "A"]
    is_measured = problem is None or (
        problem.groups == 1
        and problem.spatial_dims == 2
        and problem.memory_format != torch.contiguous_format
    )
    others = [] if is_measured else [c for c in own if c.heuristic_mode == "FALLBACK"]
    return [*of_a, *others][:MOST_BY_PYTORCH]


def _is_small_product(problem: ConvProblem) -> bool:
    """Returns whether the problem is a small matrix product with images of one pixel, as in squeeze
    and excitation."""
    is_product = problem.groups == 1 and math.prod(problem.input_shape[2:]) == 1
    return is_product and bytes_moved(problem) < _SMALL_BYTES


def has_faster_kernels(problem: ConvProblem | None, candidates: Iterable[Candidate]) -> bool:
    """Returns whether a kernel of the package among the candidates is faster than every engine that
    cuDNN compiles at run time.

    Two kinds of kernels are, measured on an H200:

    - Kernels of groups in ``channels_last``, without dilation and with equal numbers of channels:
      at most 0.87 of the best of these engines, on 45 layers (docs/results/h200.md#kernels).
    - ``implicit_gemm_1d`` in fprop with narrow filters that are not short: at most 0.93 of the best
      of all engines (docs/results/h200.md#kernels_1d).
    """
    own = {c.id.name for c in candidates if c.id.is_implementation and not is_users(c.text)}
    # It runs an engine of cuDNN with fewer filter depths, which may be slower than others.
    own.discard("filter_depths")
    if problem is None or problem.memory_format == torch.contiguous_format:
        return False
    if problem.op == "fprop" and "implicit_gemm_1d" in own:
        channels = problem.weight_shape[0] // problem.groups
        elements = math.prod(problem.weight_shape[1:])
        if channels <= _MOST_NARROW and elements >= _LEAST_ELEMENTS:
            return True
        own.remove("implicit_gemm_1d")  # one of groups may be faster all the same
    is_known = (
        problem.groups > 1
        and problem.weight_shape[0] == problem.input_shape[1]
        and max(problem.dilation) == 1
    )
    return is_known and bool(own)


def _cudnn_version() -> int:
    """Returns the version of the process's cuDNN. With a CPU-only torch, which can replay
    recordings, it is the latest known one."""
    if extension_available():
        return _C.cudnn_runtime_version()
    major, minor = max(KERNEL_CFGS)
    return 10_000 * major + 100 * minor


def _known(found: Mapping[tuple[int, int], _KnownT], cudnn_version: int) -> _KnownT | None:
    version = divmod(cudnn_version // 100, 100)
    found_with = [known for known in found if known <= version and known[0] == version[0]]
    return found[max(found_with)] if found_with else None


def other_kernels(listed: Iterable[Candidate]) -> list[Candidate]:
    """Returns the portfolios of the engines in ``listed``, without the listed candidates.

    ``workspace_bytes`` is the listed config's: a plan's own is not known before it is built.
    """
    listed = list(listed)
    portfolios = kernel_cfgs(_cudnn_version())
    found: list[Candidate] = []
    known = {candidate.text for candidate in listed}
    for candidate in listed:
        if candidate.engine is None or not candidate.is_compiled:
            continue
        for value in portfolios.get(candidate.engine, ()):
            knobs = {**candidate.knobs, _KNOB: value}
            prefix = UNFUSED if candidate.is_unfused else ""
            text = prefix + engine_text(candidate.engine, knobs)
            if text in known:
                continue
            known.add(text)
            found.append(
                replace(
                    candidate,
                    knobs=knobs,
                    text=text,
                    heuristic_mode="",
                    rank=candidate.rank + 1000 + value,
                )
            )
    return found


def without_cudnn(
    problem: ConvProblem, gpu: Gpu | None, workspace_limit: int | None = None
) -> list[Candidate]:
    """Returns PyTorch's own path, a matrix product if the problem is one, and the registered
    implementations' offers on ``gpu`` (None: unknown, so no offers)."""
    own = [OWN_PATH, MATMUL] if _C.is_matmul(problem.native()) else [OWN_PATH]
    if gpu is None:
        return own
    return [*own, *offers_of(problem, gpu, workspace_limit=workspace_limit)]


def first_of_each(candidates: Iterable[Candidate], most: int = 1) -> list[Candidate]:
    """Returns the first ``most`` candidates of each engine and of each implementation."""
    found: dict[str, dict[str, Candidate]] = {}
    for candidate in candidates:
        of_engine = found.setdefault(candidate.engine_name, {})
        if len(of_engine) < most:
            of_engine.setdefault(candidate.text, candidate)
    return [c for of_engine in found.values() for c in of_engine.values()]
