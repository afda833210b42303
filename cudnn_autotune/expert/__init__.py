"""Functions for users who look at engines themselves: to list the candidates of a problem, and to
build, run and measure them one by one. ``recipe`` has the launches of implementations of your own.

Names for programs that judge choices: operands, a timer and its turns, the board, and limits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C, require_cuda_build
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.candidates import QueriedCandidates, candidates, named
from cudnn_autotune.engines.configs import (
    HEURISTIC_MODES,
    OWN_PATH,
    Candidate,
    Device,
    build_plan,
    check_engine_text,
    engine_text,
    parse_engine_text,
)
from cudnn_autotune.engines.problem import (
    CHANNELS_LAST,
    DTYPES_BY_NAME,
    MOST_ALIGNED,
    OPERATIONS,
    ConvProblem,
    Operation,
    check_problem,
)
from cudnn_autotune.engines.problem_json import problem_from_json
from cudnn_autotune.engines.roofline import Peaks, limit
from cudnn_autotune.expert import recipe
from cudnn_autotune.sampling import Candidates
from cudnn_autotune.sampling.statistics import median_polish
from cudnn_autotune.timers.board_power import FAR_FROM_LIMIT, at_limit_ms
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.measuring import added_shapes, operands, run_operator
from cudnn_autotune.timers.telemetry import Board, Telemetry
from cudnn_autotune.timers.timer import Cache
from cudnn_autotune.timers.turns import Turns

__all__ = [
    "Board",
    "CHANNELS_LAST",
    "Candidate",
    "ConvProblem",
    "DTYPES_BY_NAME",
    "FAR_FROM_LIMIT",
    "GpuTimer",
    "HEURISTIC_MODES",
    "OPERATIONS",
    "OWN_PATH",
    "Operation",
    "Peaks",
    "Telemetry",
    "Turns",
    "at_limit_ms",
    "build_plan",
    "candidates",
    "engine_text",
    "execute",
    "execute_plan",
    "limit",
    "measure",
    "median_polish",
    "named",
    "open_timer",
    "operands",
    "parse_engine_text",
    "problem_from_json",
    "recipe",
    "run_operator",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def execute(problem: ConvProblem, engine_text: str, a: Tensor, b: Tensor, *added: Tensor) -> Tensor:
    """Runs one candidate once. The output is filled with NaN before.

    Args:
        problem: the convolution, on the device of ``a``.
        engine_text: as :attr:`Candidate.text`.
        a, b: input and weight for fprop, grad_output and weight for dgrad, grad_output and input
            for wgrad, in the problem's shapes and dtype, and in any layout.
        added: the bias, of shape ``(K,)``, the residual, of the output's shape, and the slopes, of
            shape ``(K,)``, of a fused problem that has them.

    Returns:
        The output (fprop), the input's gradient (dgrad) or the weight's (wgrad).

    Raises:
        TypeError: an argument is not a ConvProblem, a str or a tensor.
        ValueError: a tensor has another shape, dtype or device.
        PlanError: it does not build, as in :func:`build_plan`.
    """
    check_problem(problem)
    check_engine_text(engine_text)
    expected_shapes = added_shapes(problem)
    if len(added) != len(expected_shapes):
        raise ValueError(f"added must be {len(expected_shapes)} tensors, got {len(added)}")
    shapes = {"x": problem.input_shape, "w": problem.weight_shape, "y": problem.output_shape}
    roles = {"fprop": ("x", "w", "y"), "dgrad": ("y", "w", "x"), "wgrad": ("y", "x", "w")}
    first, second, written = roles[problem.op]
    given = [("a", shapes[first], a), ("b", shapes[second], b)]
    given += [("added", *pair) for pair in zip(expected_shapes, added, strict=True)]
    for argument, _, tensor in given:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument} must be a tensor, got {shown(tensor)}")
    read = []
    for argument, shape, tensor in given:
        found = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if found != (shape, problem.dtype, a.device) or not tensor.is_cuda:
            raise ValueError(
                f"{argument} must be a CUDA tensor of shape {shape} and {problem.dtype}, on the "
                f"device of a, got {found[0]}, {tensor.dtype} on {tensor.device}"
            )
        is_of_channels = len(shape) == 1
        layout = torch.contiguous_format if is_of_channels else problem.memory_format
        read.append(tensor.contiguous(memory_format=layout))
    strides = dict(zip("xwy", problem.strides, strict=True))
    if problem.pixel_strides is not None:
        source, read[0] = read[0], _empty(shapes[first], strides[first], problem, a.device)
        read[0].copy_(source)
    output = _empty(shapes[written], strides[written], problem, a.device).fill_(math.nan)
    plan = build_plan(problem, engine_text, a.device)
    named_tensors = {first: read[0], second: read[1], written: output}
    tensors = (*(named_tensors[name] for name in "xwy"), *read[2:])
    if problem.is_fused:  # its engines fail on other addresses than those of their building
        tensors = tuple(t if t.data_ptr() % MOST_ALIGNED == 0 else t.clone() for t in tensors)
    return require_cuda_build().execute(plan, *tensors)


def execute_plan(plan: _C.Plan, *tensors: Tensor) -> Tensor:
    """Runs a plan of :func:`build_plan` on tensors such as :func:`operands` makes, and returns the
    one that it writes."""
    return require_cuda_build().execute(plan, *tensors)


def open_timer(problem: ConvProblem, device: Device = "cuda") -> tuple[GpuTimer, Candidates]:
    """Opens a timer with normal random operands, and lists the problem's candidates: the arguments
    of a mode's ``select``. Raises ValueError for a device that is not here."""
    timer = GpuTimer.open(problem, device)
    return timer, QueriedCandidates(timer.search, problem, timer.operands)


def _empty(
    shape: tuple[int, ...], strides: tuple[int, ...], problem: ConvProblem, device: torch.device
) -> Tensor:
    """Returns new memory for a tensor of a problem, in its dtype."""
    return torch.empty_strided(shape, strides, dtype=problem.dtype, device=device)


def measure(
    problem: ConvProblem,
    texts: Iterable[str],
    *,
    rounds: int = 10,
    target_ms: float = 1.0,
    device: Device = "cuda",
    cache: Cache = "hot",
) -> dict[str, list[float]]:
    """Times candidates side by side, in rounds of one batch of calls each, in random order.

    Since they take turns, the candidates share every drift of the clock. They are measured as the
    sampling modes measure them (see :class:`.GpuTimer`).

    Args:
        problem: the convolution, which runs on normal random data.
        texts: of the candidates, as :attr:`Candidate.text`.
        rounds: number of samples of each candidate.
        target_ms: approximate milliseconds of a batch.
        device: a CUDA device of this machine.
        cache: ``"hot"`` runs on one set of tensors. ``"cold"`` writes to one result and rotates
            over copies of the other operands (within a quarter of free memory): no call finds them
            in the L2 cache.

    Returns:
        ``{text: [milliseconds a call, one for each round]}``.

    Raises:
        TypeError: ``problem`` is not a ConvProblem, or ``texts`` is not a list of str.
        ValueError: another argument is not allowed.
        PlanError: a candidate does not build.
        RuntimeError: a candidate does not run, or there is no memory for its workspace.
    """
    check_problem(problem)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list of engine configs' texts, got {shown(texts)}")
    texts = list(dict.fromkeys(texts))
    for text in texts:
        check_engine_text(text, "each of texts")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"rounds must be an int of 1 or more, got {shown(rounds)}")
    if not isinstance(target_ms, (int, float)) or not 0 < target_ms < math.inf:
        raise ValueError(
            f"target_ms must be a finite number of milliseconds above 0, got {shown(target_ms)}"
        )
    if cache not in ("hot", "cold"):
        raise ValueError(f"cache must be 'hot' or 'cold', got {cache!r}")
    configs = [named(text) for text in texts]
    timer = GpuTimer.open(problem, device)
    turns = Turns(timer, random.Random().getrandbits(32))
    times: dict[str, list[float]] = {text: [] for text in texts}
    try:
        for text in set(texts) - {config.text for config in timer.runnable(configs)}:
            build_plan(problem, text, device)  # raises the reason why it does not build
            raise RuntimeError(f"{text}: there is no memory for its workspace")
        for config in configs * 2:  # the first run, which loads the kernel, is not typical
            if sample := turns.once(config):
                turns.rough_ms[config.text] = sample.time_ms
        for _ in range(rounds):
            if turns.failed:
                break
            for text, sample in turns.round(turns.next_order(configs), cache, target_ms).items():
                times[text].append(sample.time_ms)
        if turns.failed:
            raise RuntimeError("; ".join(f"{text}: {why}" for text, why in turns.failed.items()))
    finally:
        timer.close()
    return times
