"""Ways of computing a problem that none of cuDNN's heuristics lists, and that are worth timing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import ATEN, Candidate, engine_text

MATMUL = replace(ATEN, text="matmul", rank=ATEN.rank - 1)
"""A 1x1 convolution as one matrix product over all pixels, by cuBLAS."""

# cuDNN compiles these engines at run time and offers one of their kernels only; another is often
# faster. engine -> KERNEL_CFG values, a portfolio that comes near the best of all of them (dgrad
# with 78, wgrad with 70): docs/findings/kernel-portfolio.md. By the cuDNN that they were found
# with: numbers of engines and kernels are its own.
KERNEL_CFGS = {(9, 19): {78: (0, 1, 4, 8, 9, 20, 30, 40), 70: (0, 9)}}
_KNOB = "KERNEL_CFG"


def kernel_cfgs(cudnn_version: int) -> Mapping[int, tuple[int, ...]]:
    """The portfolios for a cuDNN (91900 for 9.19.0): engine -> KERNEL_CFG values.

    Those of the latest version that is no later, of the same major one: what does not exist in a
    later version does not build there, and what is no longer fast loses. Before, and in another
    major version, none.
    """
    version = divmod(cudnn_version // 100, 100)
    found_with = [known for known in KERNEL_CFGS if known <= version and known[0] == version[0]]
    return KERNEL_CFGS[max(found_with)] if found_with else {}


def other_kernels(listed: Iterable[Candidate]) -> list[Candidate]:
    """The portfolio of each engine in ``listed`` that has one, without what is listed.

    ``workspace_bytes`` is that of the listed config; the plan's own is known when it is built.
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
            text = engine_text(candidate.engine, knobs)
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
    """PyTorch's own path, always, and a matrix product where the problem is one."""
    return [ATEN, MATMUL] if _C.is_matmul(native) else [ATEN]
