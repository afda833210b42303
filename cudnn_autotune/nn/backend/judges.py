"""Decides which groups of a graph are fused and which concatenations are written in place: as asked
for, or by measuring both forms on the GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.nn.backend.concatenations import (
    ConcatenationReport,
    ConvolutionCall,
    Family,
    find_families,
)
from cudnn_autotune.nn.backend.groups import Group, GroupReport, fuse_groups
from cudnn_autotune.nn.backend.slices import replace_families
from cudnn_autotune.timers.measuring import added_operands, cold_sets, operands
from cudnn_autotune.tuning import compiling_ahead

_fused = torch.ops.cudnn_autotune.conv_fused.default
_fused_into = torch.ops.cudnn_autotune.conv_fused_into_.default

# Calls of a form of a group in a CUDA graph, and the number of turns in which it is replayed.
_CALLS = 10
_ROUNDS = 9


class Verdict(NamedTuple):
    fuse: bool
    reason: str
    fused_ms: float | None = None
    several_ms: float | None = None


Judge = Callable[[Any], Verdict]
"""Says whether to fuse a group, or to write a family of concatenations in place."""


def always(_: object) -> Verdict:
    return Verdict(True, "it was asked for")


def never(reason: str) -> Judge:
    """Returns a judge that fuses nothing, for a reason."""
    return lambda _: Verdict(False, reason)


class Measured:
    """Fuses what is faster fused, on the GPU that the group is on.

    If the group is not fused, the compiler makes one kernel of all that follows the convolution, or
    none if the next kernel reads the convolution's output anyway.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Verdict] = {}

    def __call__(self, group: Group) -> Verdict:
        device = group.device
        if device.type != "cuda":
            return Verdict(False, f"it is on the device {device}")
        try:
            problem = group.problem()
        except ValueError as error:
            return Verdict(False, str(error))
        key = (problem, group.is_stored, *group.policy)
        return self.remembered(key, device, lambda: self._measure(group, problem, device))

    def remembered(
        self, key: Hashable, device: torch.device, measure: Callable[[], Verdict]
    ) -> Verdict:
        """Returns what is known of a key, or else what is measured on a GPU."""
        if key not in self._known:
            # While a graph is being compiled, calls on tensors may be recorded.
            with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
                self._known[key] = measure()
        return self._known[key]

    def problems(self, group: Group) -> list[ConvProblem]:
        """Returns the problems that are searched to measure a group: its own, and that of its
        convolution."""
        try:
            problem = group.problem()
        except ValueError:
            return []
        if group.device.type != "cuda":
            return []
        # Inductor adds the bias later.
        return [problem, replace(problem, bias=False, residual=False, activation="")]

    def _measure(self, group: Group, problem: ConvProblem, device: torch.device) -> Verdict:
        policy = group.policy
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
                sets = cold_sets(problem, operands(problem, device), _CALLS)
                times = times_ms([one_operator, several], sets)
        except torch.OutOfMemoryError:
            return Verdict(False, "there was not enough memory to measure it")
        text = f"{1e3 * times[0]:.1f} us fused, {1e3 * times[1]:.1f} us in several kernels"
        return Verdict(times[0] < times[1], text, *times)


def times_ms(
    programs: Sequence[Callable[[Operands], None]], sets: Sequence[Operands]
) -> list[float]:
    """Returns the median time of a call of each program, in milliseconds. They take turns, in CUDA
    graphs, and rotate over the sets of operands. The first call of each chooses its engine."""
    graphs = []
    for program in programs:
        program(sets[0])
        graph = torch.cuda.CUDAGraph()
        # Without a stream PyTorch takes one that it keeps, on the GPU of the first capture. Other
        # threads may compile and load kernels during the capture.
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


def fuse_judged(graph: GraphModule, groups: Sequence[Group], judge: Judge) -> list[GroupReport]:
    """Fuses the groups of a graph that a judge is for.

    Returns:
        What became of each group, in their order.
    """
    needed = []
    if isinstance(judge, Measured):
        for group in groups:
            if group.obstacle is None:
                sampling, limit = group.policy
                policy = (group.device, sampling, None if limit < 0 else limit)
                needed += [(problem, *policy) for problem in judge.problems(group)]
    with compiling_ahead.compiling(needed):
        verdicts = [
            judge(group) if group.obstacle is None else Verdict(False, group.obstacle)
            for group in groups
        ]
    reports = [
        GroupReport(group.text, group.output_shape, *verdict)
        for group, verdict in zip(groups, verdicts, strict=True)
    ]
    pairs = zip(groups, verdicts, strict=True)
    fuse_groups(graph.graph, [group for group, verdict in pairs if verdict.fuse])
    return reports


def write_in_place(graph: Graph, judge: Judge, *, channels_last: bool) -> list[ConcatenationReport]:
    """Lets convolutions write into the concatenations of a graph that a judge is for.

    Args:
        graph, channels_last: as of :func:`find_families`.
        judge: decides for each family.

    Returns:
        What became of each family, in the graph's order.
    """
    families = find_families(graph, channels_last=channels_last)
    verdicts = [
        _judged(judge, family) if isinstance(judge, Measured) else judge(family)
        for family in families
    ]
    pairs = [*zip(families, verdicts, strict=True)]
    replace_families(graph, [family for family, verdict in pairs if verdict.fuse])
    return [
        ConcatenationReport(len(family.parts), tuple(family.value.shape), *verdict)
        for family, verdict in pairs
    ]


def _judged(judge: Measured, family: Family) -> Verdict:
    """Measures a family, if its like has not been measured yet."""
    device = family.value.device
    if device.type != "cuda":
        return Verdict(False, f"it is on the device {device}")
    try:
        problems = [_problem(family, one) for one in family.convolutions]
    except ValueError as error:
        return Verdict(False, str(error))
    nodes = (*family.parts, *family.concatenations)
    slices = [(*family.slices[node], node in family.unconvolved) for node in nodes]
    key = repr((problems, slices, [one.options for one in family.convolutions]))
    return judge.remembered(key, device, lambda: _measure(family, problems))


def _problem(family: Family, one: ConvolutionCall) -> ConvProblem:
    """Returns a convolution of a family as the problem that it is in place."""
    x, w = (node.meta["val"] for node in one.operands[:2])
    _, _, bias, residual = one.operands
    stride, padding, dilation, groups, activation = one.options[:5]
    channels = family.value.shape[1]
    return ConvProblem(
        *("fprop", x.shape, w.shape, stride, padding, dilation, groups, x.dtype),
        torch.channels_last,
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
        pixel_strides=(
            channels if family.is_slice(one.input) else x.shape[1],
            channels if one.node in family.written else w.shape[0],
        ),
    )


def _measure(family: Family, problems: Sequence[ConvProblem]) -> Verdict:
    device = family.value.device
    needed = []
    for one, problem in zip(family.convolutions, problems, strict=True):
        sampling, limit = one.options[-2:]
        needed.append((problem, device, sampling, None if limit < 0 else limit))
    try:
        # Autocast would make other problems of these.
        with (
            torch.autocast("cuda", enabled=False),
            torch.random.fork_rng([device]),
            compiling_ahead.compiling(needed),
        ):
            forms = _Forms(family)
            times = times_ms([forms.in_place, forms.several], [()])
    except torch.OutOfMemoryError:
        return Verdict(False, "there was not enough memory to measure it")
    text = f"{1e3 * times[0]:.1f} us in place, {1e3 * times[1]:.1f} us with copies"
    return Verdict(times[0] < times[1], text, *times)


class _Forms:
    """The convolutions of a family, with its copies, on random tensors.

    Inductor computes a concatenation that no convolution reads in the kernels that read it, up to a
    number of parts, and else before them. A pass by ATen that does the same stands for these: it
    reads and writes as many bytes.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._whole = _random(family.concatenations[0])
        operands = (node for one in family.convolutions for node in one.operands)
        nodes = {*family.parts, *(node for node in operands if node is not None)}
        self._dense = {node: _random(node) for node in nodes}

    def _slice(self, node: Node) -> Tensor:
        return self._whole.narrow(1, *self._family.slices[node])

    def in_place(self, _: object) -> None:
        family = self._family
        for part in family.copied:
            self._slice(part).copy_(self._dense[part])
        for one in family.convolutions:
            first, *others = one.operands
            input = self._slice(first) if family.is_slice(first) else self._dense[first]
            arguments = (input, *map(self._dense.get, others), *one.options)
            if one.node in family.written:
                _fused_into(self._slice(one.node), *arguments)
            else:
                _fused(*arguments)
        for cat in self._family.unconvolved:
            self._slice(cat).clone()

    def several(self, _: object) -> None:
        from torch._inductor import config  # slow to import

        for cat in self._family.concatenations:
            parts = self._family.parts_of(cat)
            whole = torch.cat([self._dense[part] for part in parts], 1)
            if cat in self._family.unconvolved and len(parts) > config.max_pointwise_cat_inputs:
                whole.clone()
        for one in self._family.convolutions:
            _fused(*map(self._dense.get, one.operands), *one.options)


def _random(node: Node) -> Tensor:
    value = node.meta["val"]
    found = torch.randn(value.shape, dtype=value.dtype, device=value.device)
    if value.dim() < 4:
        return found
    # Products of such a weight do not overflow.
    found *= math.prod(value.shape[1:]) ** -0.5
    return found.contiguous(memory_format=torch.channels_last)


def gain(groups: Iterable[GroupReport]) -> float:
    """Returns by how much longer a program takes for groups without any fusion, as a part of the
    time that it takes with those that are fused; 0 if nothing was measured."""
    taken = without = 0.0
    for one in groups:
        if one.fused_ms is not None and one.several_ms is not None:
            taken += one.fused_ms if one.is_fused else one.several_ms
            without += one.several_ms
    return without / taken - 1 if taken else 0.0


JUDGES: Mapping[str, Callable[[], Judge]] = {
    "measure": Measured,
    "always": lambda: always,
    "never": lambda: never("it was asked for"),
}
"""Makes the judge of a graph, by the option ``fuse``."""
