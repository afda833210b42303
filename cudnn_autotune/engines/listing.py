"""Lists the candidates of a problem: cuDNN's engine configs, and what implementations offer."""

from __future__ import annotations

from cudnn_autotune.engines.candidate_id import identify, parse
from cudnn_autotune.engines.configs import (
    ATEN,
    Candidate,
    Device,
    check_engine_text,
    check_workspace_limit,
    open_search,
    parse_engine_text,
    query,
)
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.unlisted import MATMUL


def candidates(
    problem: ConvProblem,
    device: Device = "cuda",
    *,
    workspace_limit: int | None = None,
    filtered: bool = True,
) -> list[Candidate]:
    """Returns the engine configs that cuDNN's heuristics list for ``problem``, best guess first,
    and behind them what the registered implementations offer for it.

    Modes A, B and FALLBACK follow in this order, with each config once. Nothing is built or run, so
    that a candidate may still turn out not to build. For a problem with a bias and nothing else
    behind the convolution, the configs that add the bias themselves alternate with those of the
    convolution alone (``Candidate.is_unfused``). The candidates of implementations have no
    ``engine``. PyTorch's own path, ``"aten"``, competes too, and is not listed here.

    Without the CUDA driver's library, ``libcuda.so.1``, cuDNN does not list the engines that it
    compiles at run time, which the log says once; from 9.28 on it takes no property file then. A
    library of that name that has the driver's functions is enough, they need not do anything.

    Args:
        problem: the convolution.
        device: a CUDA device, or a GPU that need not be here: the name of a property file that
            the package ships (``"h200"``, ``"h100"``, ``"a100"``, ``"l4"``, ``"t4"``) or a path
            to one (cuDNN 9.8 and later).
        workspace_limit: the most bytes of workspace that a candidate may need; None: no limit.
        filtered: whether to leave out what PyTorch would: candidates that are not deterministic
            where ``problem`` asks for it, that convert inputs to a narrower type, or that use
            tensor cores for float32 without TF32.

    Raises:
        TypeError: ``problem`` is not a ConvProblem.
        ValueError: the device is unknown, cuDNN does not take the property file, or
            ``workspace_limit`` is negative.
        CudnnError: cuDNN has no graph for the problem.
    """
    check_workspace_limit(workspace_limit)
    search = open_search(problem, device)
    listed = query(search, problem, workspace_limit=workspace_limit, filtered=filtered)
    offered = offers_of(problem, gpu_of(device), workspace_limit=workspace_limit, filtered=filtered)
    return [*listed, *offered]


def named(text: str, rank: int = 0) -> Candidate:
    """Returns the candidate that a text names, of any kind, without workspace and notes; it need
    not exist for any problem.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: ``text`` names no candidate.
    """
    check_engine_text(text)
    for known in (ATEN, MATMUL):
        if text == known.text:
            return known
    if identify(text).is_implementation:
        parse(text)
        return Candidate(None, {}, 0, (), (), text, "", rank)
    return Candidate(*parse_engine_text(text), 0, (), (), text, "", rank)
