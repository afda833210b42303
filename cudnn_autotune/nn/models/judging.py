"""Decides whether a group is faster as one operator, by measuring both forms of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn.models.groups import Group, GroupReport, Groups, fuse_groups, hint
from cudnn_autotune.timers.measuring import Operands, added_operands, cold_sets, operands
from cudnn_autotune.tuning import compiling_ahead

_CALLS = 10
_ROUNDS = 9


class Verdict(NamedTuple):
    fuse: bool
    reason: str


class Judge(Protocol):
    def __call__(self, group: Group, *, channels_last: bool) -> Verdict:
        """Says whether to fuse a group of a graph, which will run in channels_last or not."""


def always(group: Group, *, channels_last: bool) -> Verdict:
    return Verdict(True, "it was asked for")


def never(reason: str) -> Judge:
    """Fuses nothing, for a reason."""
    return lambda group, *, channels_last: Verdict(False, reason)


class Measured:
    """Fuses what is faster fused, on the GPU that the group is on.

    If the group is not fused, the compiler makes one kernel of all that follows the convolution, or
    none if the next kernel reads the convolution's output anyway.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[ConvProblem, bool, str, int], Verdict] = {}

    def __call__(self, group: Group, *, channels_last: bool) -> Verdict:
        device = group.device
        if device.type != "cuda":
            return Verdict(False, f"it is on the device {device}")
        try:
            problem = group.problem(channels_last=channels_last)
        except ValueError as error:
            return Verdict(False, str(error))
        key = (problem, group.is_stored, group.sampling, group.workspace_limit)
        if key not in self._known:
            # While a graph is being compiled, calls on tensors may be recorded.
            with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
                self._known[key] = self._measure(group, problem, device)
        return self._known[key]

    def problems(self, group: Group, *, channels_last: bool) -> list[ConvProblem]:
        """Those that are searched to measure a group: its own, and that of its convolution."""
        try:
            problem = group.problem(channels_last=channels_last)
        except ValueError:
            return []
        if group.device.type != "cuda":
            return []
        # Inductor adds the bias later.
        return [problem, replace(problem, bias=False, residual=False, activation="")]

    def _measure(self, group: Group, problem: ConvProblem, device: torch.device) -> Verdict:
        policy = (group.sampling, group.workspace_limit)
        geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)

        def one_operator(data: Operands) -> None:
            x, w, _, *added = data
            bias, residual = added_operands(problem, added)
            torch.ops.cudnn_autotune.conv_fused(
                x, w, bias, residual, *geometry, problem.activation, *policy
            )

        def several(data: Operands) -> None:
            x, w, _, *added = data
            _, residual = added_operands(problem, added)
            y = torch.ops.cudnn_autotune.conv_fprop(x, w, None, *geometry, *policy)
            # This reads and writes what a generated kernel would, at the speed of the memory.
            if group.is_stored and residual is not None:
                torch.add(y, residual, out=y)
            elif group.is_stored:
                torch.relu_(y)

        try:
            # Autocast would make other problems of these.
            with torch.autocast("cuda", enabled=False), torch.random.fork_rng([device]):
                sets = cold_sets(problem, operands(problem, device))
                times = _times_ms([one_operator, several], sets)
        except torch.OutOfMemoryError:
            return Verdict(False, "there was not enough memory to measure it")
        text = f"{1e3 * times[0]:.1f} us fused, {1e3 * times[1]:.1f} us in several kernels"
        return Verdict(times[0] < times[1], text)


def _times_ms(
    programs: Sequence[Callable[[Operands], None]], sets: Sequence[Operands]
) -> list[float]:
    """Median time of a call of each program. They take turns, in CUDA graphs, and rotate over the
    sets of operands. The first call of each chooses its engine."""
    graphs = []
    for program in programs:
        program(sets[0])
        graph = torch.cuda.CUDAGraph()
        # Without a stream PyTorch takes one that it keeps, on the GPU of the first capture. Other
        # threads may compile kernels meanwhile, and load them.
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(_CALLS):
                program(sets[i % len(sets)])
        graphs.append(graph)
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS + 1):
        for graph, times in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / _CALLS)
    return [statistics.median(times[1:]) for times in samples]


def fuse_judged(
    graph: GraphModule, groups: Groups, judge: Judge, *, channels_last: bool = False
) -> list[GroupReport]:
    """Fuses the groups of a graph that a judge is for.

    Args:
        channels_last: the graph will run in channels_last, whatever the strides in it.

    Returns:
        What became of each convolution, in the graph's order.
    """
    reports = {}
    needed = []
    if isinstance(judge, Measured):
        for group in groups.found:
            limit = None if group.workspace_limit < 0 else group.workspace_limit
            for problem in judge.problems(group, channels_last=channels_last):
                needed.append((problem, group.device, group.sampling, limit))
    with compiling_ahead.compiling(needed):
        for group in groups.found:
            verdict = judge(group, channels_last=channels_last)
            shape = _hints(group.output.meta["val"])
            report = GroupReport(group.text, shape, verdict.fuse, verdict.reason)
            reports[group.convolution] = report
    for node, reason in groups.alone:
        reports[node] = GroupReport("conv", _hints(node.meta["val"]), False, reason)
    in_order = [reports[node] for node in graph.graph.nodes if node in reports]
    fuse_groups(
        graph.graph, [group for group in groups.found if reports[group.convolution].is_fused]
    )
    graph.graph.lint()
    graph.recompile()
    return in_order


def _hints(value: Tensor) -> tuple[int, ...]:
    return tuple(hint(size) for size in value.shape)


JUDGES: Mapping[str, Callable[[], Judge]] = {
    "measure": Measured,
    "always": lambda: always,
    "never": lambda: never("it was asked for"),
}
