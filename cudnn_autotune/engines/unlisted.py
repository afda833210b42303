"""Candidates that none of cuDNN's heuristics lists and that are worth timing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import ATEN, UNFUSED, Candidate, engine_text

MATMUL = replace(ATEN, text="matmul", rank=ATEN.rank - 1)
"""A 1x1 convolution as one matrix product over all pixels, by cuBLAS."""

# cuDNN compiles these engines at run time and lists only one of their kernels, where another is
# often faster. Each engine has a portfolio of KERNEL_CFG values that comes near the best of all of
# them (dgrad with 78, wgrad with 70; docs/findings/kernel-portfolio.md). The first one is the only
# one that ``auto`` compiles. The numbers belong to the version of cuDNN that is the outer key.
KERNEL_CFGS = {(9, 19): {78: (1, 0, 4, 8, 9, 20, 30, 40), 70: (0, 9)}}
_KNOB = "KERNEL_CFG"


def kernel_cfgs(cudnn_version: int) -> Mapping[int, tuple[int, ...]]:
    """Returns the portfolios for a version of cuDNN (91900: 9.19.0), KERNEL_CFG values by engine.

    They are those of the latest known version that is no later and of the same major version. A
    config that a later version lacks does not build there, and one that is no longer fast loses the
    race. For earlier versions and other major versions there are none.
    """
    version = divmod(cudnn_version // 100, 100)
    found_with = [known for known in KERNEL_CFGS if known <= version and known[0] == version[0]]
    return KERNEL_CFGS[max(found_with)] if found_with else {}


def other_kernels(listed: Iterable[Candidate]) -> list[Candidate]:
    """Returns the portfolio of each engine in ``listed`` that has one, without what is listed.

    ``workspace_bytes`` is that of the listed config: the plan's own is not known until it is built.
    """
    listed = list(listed)
    portfolios = kernel_cfgs(_C.cudnn_runtime_version())
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


def without_cudnn(native: _C.ConvProblem) -> list[Candidate]:
    """Returns PyTorch's own path, and a matrix product where the problem is one."""
    return [ATEN, MATMUL] if _C.is_matmul(native) else [ATEN]
