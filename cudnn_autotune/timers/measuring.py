"""Runs and measures engine configs by name, for users, benchmarks and audits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C, require_cuda_build
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.configs import (
    Device,
    build_plan,
    check_engine_text,
    cuda_index,
    open_search,
    parse_engine_text,
)
from cudnn_autotune.engines.problem import ConvProblem, check_problem

# Shorter calls are replayed from a CUDA graph: the host could not enqueue them fast enough.
_GRAPH_BELOW_MS = 0.05
_MOST_CALLS = 1000
# The share of free memory that the copies for a cold cache may use.
_MEMORY_SHARE = 0.25
# After traffic of this many times its size the L2 cache holds no earlier data.
_L2_MULTIPLE = 5

MOST_ALIGNED = 32
"""The largest alignment, in bytes, that engines distinguish."""

Operands = tuple[Tensor, ...]
"""As ``engines.queried.Tensors``: input, weight, output, and what a fused problem adds."""
WRITTEN = {"fprop": 2, "dgrad": 0, "wgrad": 1}
"""The index of the operand (0: input, 1: weight, 2: output) that an operation writes."""


def operands(problem: ConvProblem, device: torch.device | int | str = "cuda") -> Operands:
    """Returns the operands of ``problem`` with normal random data, in its layout and dtype: input,
    weight, output, and the bias and the residual of a fused problem that has them. Each lies at an
    address that has the problem's alignment for it, and no larger one.

    The data are not zeros, because zeros draw less power, so that engines run faster on them.

    Raises:
        ValueError: an alignment is less than one element.
    """
    shapes = [problem.input_shape, problem.weight_shape, problem.output_shape]
    alignments = list(problem.alignment)
    for added in _added_shapes(problem):
        shapes.append(added)
        alignments.append(MOST_ALIGNED)
    size = problem.dtype.itemsize
    if min(problem.alignment) < size:
        raise ValueError(
            f"problem.alignment must be {size} bytes or more for {problem.dtype}, "
            f"got {problem.alignment}"
        )
    found = []
    for shape, alignment in zip(shapes, alignments, strict=True):
        tensor = torch.randn(shape, device=device).to(problem.dtype)
        if len(shape) > 1:  # a bias has no memory format
            tensor = tensor.contiguous(memory_format=problem.memory_format)
        found.append(_aligned(tensor, alignment))
    return tuple(found)


def _added_shapes(problem: ConvProblem) -> list[tuple[int, ...]]:
    """The shapes of the bias and of the residual that the problem has."""
    bias = [(problem.weight_shape[0],)] if problem.bias else []
    return [*bias, *([problem.output_shape] if problem.residual else [])]


def _aligned(tensor: Tensor, alignment: int) -> Tensor:
    """Returns ``tensor``, which is new and lies at a multiple of 32 bytes, or a copy of it that is
    aligned to ``alignment`` bytes only."""
    if alignment == MOST_ALIGNED:
        return tensor
    ahead = alignment // tensor.element_size()
    room = tensor.new_empty(ahead + tensor.numel())
    return room.as_strided(tensor.shape, tensor.stride(), ahead).copy_(tensor)


def added_operands(
    problem: ConvProblem, added: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Bias and residual among the operands of a problem from the fourth on."""
    bias = added[0] if problem.bias else None
    residual = added[-1] if problem.residual else None
    return bias, residual


def run_operator(problem: ConvProblem, data: Operands, sampling: str) -> Tensor:
    """Computes ``problem`` with the package's operator, as a layer would. The first call chooses
    the engine in the mode ``sampling``."""
    x, w, y, *added = data
    ops = torch.ops.cudnn_autotune
    tail = (problem.stride, problem.padding, problem.dilation, problem.groups, sampling, -1)
    output: Tensor
    if problem.is_fused:
        bias, residual = added_operands(problem, added)
        geometry, policy = tail[:4], tail[4:]
        output = ops.conv_fused(x, w, bias, residual, *geometry, problem.activation, *policy)
    elif problem.op == "fprop":
        output = ops.conv_fprop(x, w, None, *tail)
    elif problem.op == "dgrad":
        output = ops.conv_dgrad(y, w, problem.input_shape, *tail)
    else:
        output = ops.conv_wgrad(y, x, problem.weight_shape, *tail)
    return output


def execute(problem: ConvProblem, engine_text: str, a: Tensor, b: Tensor, *added: Tensor) -> Tensor:
    """Runs one engine config once. The output is filled with NaN before.

    Args:
        problem: the convolution, on the device of ``a``.
        engine_text: the config, as in :attr:`Candidate.text`.
        a, b: input and weight for fprop, grad_output and weight for dgrad, grad_output and input
            for wgrad, in the problem's shapes and dtype, and in any layout.
        added: the bias, of shape ``(K,)``, and the residual, of the output's shape, of a fused
            problem that has them.

    Returns:
        The output (fprop), the input's gradient (dgrad) or the weight's (wgrad).

    Raises:
        TypeError: an argument is not a ConvProblem, a str or a tensor.
        ValueError: a tensor has another shape, dtype or device.
        CudnnError: the config does not build, as in :func:`build_plan`.
    """
    check_problem(problem)
    check_engine_text(engine_text)
    expected_count = int(problem.bias) + int(problem.residual)
    if len(added) != expected_count:
        raise ValueError(f"added must be {expected_count} tensors, got {len(added)}")
    for argument, tensor in (("a", a), ("b", b), *(("added", tensor) for tensor in added)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument} must be a tensor, got {shown(tensor)}")
    shapes = {
        "x": problem.input_shape,
        "w": problem.weight_shape,
        "y": problem.output_shape,
    }
    roles = {"fprop": ("x", "w", "y"), "dgrad": ("y", "w", "x"), "wgrad": ("y", "x", "w")}
    first, second, written = roles[problem.op]
    given = {}
    for argument, name, tensor in (("a", first, a), ("b", second, b)):
        expected = (shapes[name], problem.dtype, a.device)
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != expected or not tensor.is_cuda:
            raise ValueError(
                f"{argument} must be a CUDA tensor of shape {shapes[name]} and {problem.dtype}, "
                f"got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
            )
        given[name] = tensor.contiguous(memory_format=problem.memory_format)
    more = []
    for tensor, shape in zip(added, _added_shapes(problem), strict=True):
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, problem.dtype, a.device):
            raise ValueError(
                f"added must be of shape {shape} and {problem.dtype} on {a.device}, "
                f"got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
            )
        is_bias = len(shape) == 1
        layout = torch.contiguous_format if is_bias else problem.memory_format
        more.append(tensor.contiguous(memory_format=layout))
    given[written] = torch.full(
        shapes[written], math.nan, dtype=problem.dtype, device=a.device
    ).contiguous(memory_format=problem.memory_format)
    plan = build_plan(problem, engine_text, a.device)
    tensors = (given["x"], given["w"], given["y"], *more)
    if problem.is_fused:  # its engines fail on other addresses than those that they were made for
        tensors = tuple(t if t.data_ptr() % MOST_ALIGNED == 0 else t.clone() for t in tensors)
    require_cuda_build().execute(plan, *tensors)
    return given[written]


def measure(
    problem: ConvProblem,
    texts: Iterable[str],
    *,
    rounds: int = 10,
    target_ms: float = 1.0,
    device: Device = "cuda",
    cache: str = "hot",
) -> dict[str, list[float]]:
    """Times engine configs side by side, in rounds of one batch of calls each, in random order.

    Since they take turns, the configs share every drift of the clock. A batch lies between two CUDA
    events without synchronisation; calls under 50 microseconds are replayed from a CUDA graph.

    Args:
        problem: the convolution, which runs on normal random data.
        texts: engine configs, as in :attr:`Candidate.text`.
        rounds: number of samples of each config.
        target_ms: about how long a batch should take, in milliseconds.
        device: a CUDA device of this machine.
        cache: ``"hot"`` runs on one set of tensors. ``"cold"`` rotates over so many copies of what
            is read that they fill five times the L2 cache (within a quarter of free memory), and
            writes to one result.

    Returns:
        ``{text: [milliseconds a call, one for each round]}``.

    Raises:
        TypeError: ``problem`` is not a ConvProblem, or ``texts`` is not a list of str.
        ValueError: another argument is not allowed.
        CudnnError: a config does not build.
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
    index = cuda_index(device)
    if index is None:
        raise ValueError(f"device must be a CUDA device that is here, got {device!r}")
    for text in texts:
        parse_engine_text(text)
    search = open_search(problem, index)
    plans = {text: search.build(text) for text in texts}
    with torch.cuda.device(index):
        data = operands(problem, index)
        tensors = cold_sets(problem, data) if cache == "cold" else [data]
        batches = {text: _Batch(plan, tensors, target_ms) for text, plan in plans.items()}
        times: dict[str, list[float]] = {text: [] for text in batches}
        for _ in range(rounds):
            order = list(batches)
            random.shuffle(order)
            events = {text: batches[text].run() for text in order}
            torch.cuda.synchronize()
            for text, (start, end) in events.items():
                times[text].append(start.elapsed_time(end) / batches[text].calls)
    return times


def fills_cache(problem: ConvProblem, data: Operands) -> bool:
    """Returns whether one call reads so much that it replaces all earlier data in the L2 cache."""
    return _read_bytes(problem, data) >= _wanted_bytes(data[0].device)


def _read_bytes(problem: ConvProblem, data: Operands) -> int:
    return sum(t.nbytes for i, t in enumerate(data) if i != WRITTEN[problem.op])


def _wanted_bytes(device: torch.device) -> int:
    return _L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size


def cold_sets(problem: ConvProblem, first: Operands, most: int | None = None) -> list[Operands]:
    """Returns ``first`` and sets with copies of the operands that are read, so many that calls
    which rotate over them never find their operands in the L2 cache. Where one call
    :func:`fills_cache` by itself, it is one set.

    All sets write to the result of ``first``, as PyTorch's own path does, whose result the
    allocator puts at the same address each time. With a result of its own in each set an engine
    would seem up to 4 % slower than the same one in PyTorch. If memory runs out, half of the copies
    are kept.

    Args:
        first: the operands on a CUDA device.
        most: the largest number of sets. In any case they use at most a quarter of free memory.
    """
    written = WRITTEN[problem.op]
    device, size = first[0].device, _read_bytes(problem, first)
    if fills_cache(problem, first):
        return [first]
    free, _ = torch.cuda.mem_get_info(device)
    affordable = max(1, int(_MEMORY_SHARE * free / size))
    wanted = min(math.ceil(_wanted_bytes(device) / size) + 1, affordable)
    sets = [first]
    try:
        while len(sets) < min(wanted, most or wanted):
            # clone() keeps the strides of dense tensors.
            sets.append(tuple(t if i == written else t.clone() for i, t in enumerate(first)))
    except torch.OutOfMemoryError:
        del sets[(len(sets) - 1) // 2 + 1 :]  # leaves some memory for the caller
    return sets


class _Batch:
    """Some calls of one plan between two events; a warm-up determines how many."""

    def __init__(self, plan: _C.Plan, tensors: list[Operands], target_ms: float) -> None:
        extension = require_cuda_build()
        self._enqueue: Callable[[int], None] = lambda i: extension.execute(
            plan, *tensors[i % len(tensors)]
        )
        self.calls = 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._enqueue(0)
        start, end = self.run()
        torch.cuda.synchronize()
        call_ms = max(start.elapsed_time(end), 1e-3)
        self.calls = max(1, min(math.ceil(target_ms / call_ms), _MOST_CALLS))
        if call_ms < _GRAPH_BELOW_MS:
            graph = torch.cuda.CUDAGraph()
            # Without a stream PyTorch takes one that it keeps, on the GPU of the first capture.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                self._enqueue_all()
            self._graph = graph
            graph.replay()

    def _enqueue_all(self) -> None:
        for i in range(self.calls):
            self._enqueue(i)

    def run(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._enqueue_all()
        end.record()
        return start, end
