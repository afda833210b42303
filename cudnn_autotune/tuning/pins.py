"""Pins: engines that users force on problems."""

from __future__ import annotations

import torch

from cudnn_autotune.core.extension import require_cuda_build
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.candidate_id import canonical, identify, parse
from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import build_plan, check_engine_text
from cudnn_autotune.engines.problem import ConvProblem, check_problem
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.tuning import choice_log

_lock = ForkSafeLock()
_pins: dict[ConvProblem, str] = {}


def pin(problem: ConvProblem, engine_text: str) -> None:
    """Makes ``engine_text`` compute ``problem`` from its next call on, in every sampling mode.

    Nothing is timed. The output is checked at the first call; if it is wrong a warning is logged,
    and the engine serves all the same. Where there is a GPU the config must build on it.

    Args:
        problem: exactly as it occurs, as in ``Choice.problem``.
        engine_text: as ``Candidate.text``: an engine config, ``"aten"`` (PyTorch's own path),
            ``"matmul"`` for a matrix product, such as a 1x1 convolution, or a registered
            implementation's offer.

    Raises:
        TypeError: ``problem`` is no ConvProblem, or ``engine_text`` is no str.
        ValueError: ``engine_text`` does not parse, is ``"matmul"`` where the problem is no matrix
            product, or names an implementation that is not registered in this version.
        PlanError: it does not exist for the problem, or does not build.
    """
    check_problem(problem)
    check_engine_text(engine_text)
    Node(engine_text, "engine_text").text()
    engine_text = canonical(engine_text)
    kind = identify(engine_text).kind
    if kind == "matmul":
        if not require_cuda_build().is_matmul(problem.native()):
            raise ValueError(
                f"engine_text: {engine_text!r} computes only matrix products in half precision: "
                f"1x1 convolutions of stride 1 in channels_last or of one image, or kernels as "
                f"large as the input; without padding, determinism, or an epilogue other than a "
                f"bias; got {problem.text}"
            )
    elif kind != "aten":
        named(engine_text)
        if kind == "implementation":
            _check_registered(engine_text)
        if torch.cuda.is_available():
            build_plan(problem, engine_text)
    with _lock:
        _pins[problem] = engine_text
    choice_log.forget_problem(problem)


def _check_registered(engine_text: str) -> None:
    try:
        registry.get(parse(engine_text))
    except ImplementationError as error:
        raise ValueError(f"engine_text: {error}") from None


def unpin(problem: ConvProblem | None = None) -> None:
    """Ends :func:`pin` for a problem, or for all (None): the next call chooses as without a pin.

    Raises:
        TypeError: ``problem`` is no ConvProblem.
        KeyError: ``problem`` is not pinned.
    """
    if problem is not None:
        check_problem(problem)
    with _lock:
        if problem is not None and problem not in _pins:
            raise KeyError(f"problem is not pinned: {problem}")
        ended = list(_pins) if problem is None else [problem]
        for one in ended:
            del _pins[one]
    for one in ended:
        choice_log.forget_problem(one)


def pins() -> dict[ConvProblem, str]:
    """Returns every pinned problem with the text of its engine."""
    with _lock:
        return dict(_pins)


def pinned(problem: ConvProblem) -> str | None:
    """Returns the text of the engine that ``problem`` is pinned to, or None."""
    with _lock:
        return _pins.get(problem)
