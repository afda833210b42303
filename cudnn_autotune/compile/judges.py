"""The decisions on groups of a graph (fused or not) and concatenations (in place or not): by
option, or by a measurement of both forms on the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_autotune.compile import computation
from cudnn_autotune.compile.concatenations import ConcatenationReport, Family, find_families
from cudnn_autotune.compile.groups import Group, GroupReport, fuse_groups
from cudnn_autotune.compile.slices import replace_families
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.store import locked, settings, verdicts
from cudnn_autotune.timers.measuring import added_operands, cold_sets, operands
from cudnn_autotune.timers.programs import CAPTURED_CALLS, captured_in_turns
from cudnn_autotune.tuning import choice_log, compiling_ahead
from cudnn_autotune.tuning.compiling_ahead import Search

_fprop = torch.ops.cudnn_autotune.conv_fprop.default
_fused = torch.ops.cudnn_autotune.conv_fused.default
_fused_into = torch.ops.cudnn_autotune.conv_fused_into_.default


RULE = 1
"""The version of the rule of a verdict. Verdicts of another version on disk are measured again."""


class Verdict(NamedTuple):
    """The decision on a group or a family, with the milliseconds of both forms if measured."""

    fuse: bool
    reason: str
    fused_ms: float | None = None
    several_ms: float | None = None


@dataclass(frozen=True)
class _Times:
    """The times of both forms, as they are kept on disk."""

    fused_ms: float
    several_ms: float


Judge = Callable[[Any], Verdict]
"""A function from a group or a family of concatenations to the decision on it."""


def always(_: object) -> Verdict:
    return Verdict(True, "it was asked for")


def never(reason: str) -> Judge:
    """Returns a judge against every fusion, for a reason."""
    return lambda _: Verdict(False, reason)


class Measured:
    """The judge that measures on the GPU whether fused groups and families in place are faster.
    Equal ones are measured once, and kept on disk for the next process."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Verdict] = {}

    def __call__(self, change: Group | Family) -> Verdict:
        forms = _forms_of(change)
        if isinstance(forms, str):
            return Verdict(False, forms)
        if self.known(forms) is None and settings.is_locked():
            text = change.text if isinstance(change, Group) else "a concatenation"
            locked.missed("groups", text)
            self._known[forms.key] = Verdict(False, locked.REASON)
        if self.known(forms) is None:
            # During a graph's compilation calls on tensors may be recorded, and PyTorch may use
            # Python decompositions instead of its kernels.
            with (
                _disable_current_modes(),
                no_python_dispatcher(),
                torch.no_grad(),
                torch.cuda.device(change.device),
            ):
                self._known[forms.key] = _measured(forms)
        return self._known[forms.key]

    def known(self, forms: _GroupForms | _FamilyForms) -> Verdict | None:
        """Returns the verdict of this process, or of an earlier one, on equal forms."""
        if forms.key not in self._known:
            kept = verdicts.find_kept(forms.device.index, _name(forms), _Times)
            if kept is not None:
                self._known[forms.key] = _verdict(forms, kept, "from the store: ")
        return self._known.get(forms.key)


def _name(forms: _GroupForms | _FamilyForms) -> str:
    """Returns the name of forms on disk. Their policy may be that of the settings."""
    conditions = computation.conditions(forms.device.type)
    return verdicts.name_of(forms.kind, RULE, repr(forms.key), conditions)


def _verdict(forms: _GroupForms | _FamilyForms, times: _Times, source: str = "") -> Verdict:
    both = (times.fused_ms, times.several_ms)
    text = ", ".join(
        f"{1e3 * ms:.1f} us {name}" for ms, name in zip(both, forms.names, strict=True)
    )
    return Verdict(times.fused_ms < times.several_ms, f"{source}{text}", *both)


def _forms_of(change: Group | Family) -> _GroupForms | _FamilyForms | str:
    """Returns the forms of a group or a family to measure, or the reason why that is impossible."""
    if change.device.type != "cuda":
        return f"it is on the device {change.device}"
    try:
        return _GroupForms(change) if isinstance(change, Group) else _FamilyForms(change)
    except ValueError as error:
        return str(error)


def _measured(forms: _GroupForms | _FamilyForms) -> Verdict:
    """Times both forms; the verdict is for ``fused`` if that is the faster one."""
    try:
        # Autocast would make other problems of these.
        with (
            torch.autocast("cuda", enabled=False),
            compiling_ahead.compiling(forms.searches),
        ):
            # The engines of the unfused convolution are searched first: fewer of them are compiled.
            times = _Times(*captured_in_turns([forms.several, forms.fused], forms.operands())[::-1])
    except torch.OutOfMemoryError:
        return Verdict(False, "there was not enough memory to measure it")
    problems = {problem for problem, *_ in forms.searches}
    modes = {mode or None for _, _, mode, _ in forms.searches}
    if computation.is_kept(modes) and choice_log.are_settled(problems):
        verdicts.keep(forms.device.index, _name(forms), times)
    return _verdict(forms, times)


class _GroupForms:
    """The two forms of a group: one call, and several kernels.

    A compiler makes one kernel of all nodes after a convolution, or none if the next kernel reads
    the convolution's output anyway.
    """

    kind, names = "group", ("fused", "in several kernels")

    def __init__(self, group: Group) -> None:
        self.device = group.device
        self._group, self._problem = group, group.problem()
        # Inductor adds the bias later.
        alone = replace(self._problem, bias=False, residual=False, activation="")
        self.key = (self._problem, group.is_stored, *group.policy)
        self.searches = [
            _search(problem, group.device, *group.policy) for problem in (self._problem, alone)
        ]
        geometry = (alone.stride, alone.padding, alone.dilation, alone.groups)
        self._options = (*geometry, self._problem.activation, *group.policy)

    def operands(self) -> Sequence[Operands]:
        return cold_sets(self._problem, operands(self._problem, self._group.device), CAPTURED_CALLS)

    def fused(self, data: Operands) -> None:
        x, w, _, *added = data
        bias, residual, slope = added_operands(self._problem, added)
        _fused(x, w, bias, residual, *self._options, slope)

    def several(self, data: Operands) -> None:
        x, w, _, *added = data
        _, residual, _ = added_operands(self._problem, added)
        *geometry, _, sampling, workspace_limit = self._options
        y = _fprop(x, w, None, *geometry, sampling, workspace_limit)
        # This reads and writes as a generated kernel would, at the speed of the memory.
        if self._group.is_stored and residual is not None:
            torch.add(y, residual, out=y)
        elif self._group.is_stored:
            torch.relu_(y)


class _FamilyForms:
    """The two forms of a family's convolutions and copies: in place, and with concatenations.

    Inductor computes a concatenation that no convolution reads in the kernels that read it, up to a
    number of parts, and else before them. Here a pass by ATen with the same reads and writes
    replaces these.
    """

    kind, names = "family", ("in place", "with copies")

    def __init__(self, family: Family) -> None:
        self.device = family.device
        self._family, problems = family, family.problems()
        nodes = (*family.parts, *family.concatenations)
        slices = [(*family.slices[node], node in family.unconvolved) for node in nodes]
        self.key = repr((problems, slices, [one.options for one in family.convolutions]))
        self.searches = [
            _search(problem, family.device, *one.options[-2:])
            for one, problem in zip(family.convolutions, problems, strict=True)
        ]

    def operands(self) -> Sequence[tuple[Tensor, dict[Node, Tensor]]]:
        """Returns one set: the family's tensor, and the parts' and operands' tensors by node."""
        family = self._family
        operands = (node for one in family.convolutions for node in one.operands)
        nodes = {*family.parts, *(node for node in operands if node is not None)}
        return [(_random(family.concatenations[0]), {node: _random(node) for node in nodes})]

    def fused(self, data: tuple[Tensor, dict[Node, Tensor]]) -> None:
        family, (whole, dense) = self._family, data

        def sliced(node: Node) -> Tensor:
            return whole.narrow(1, *family.slices[node])

        for part in family.copied:
            sliced(part).copy_(dense[part])
        for one in family.convolutions:
            first, *others = one.operands
            input = sliced(first) if family.is_slice(first) else dense[first]
            arguments = one.arguments((input, *map(dense.get, others)))
            if one.node in family.written:
                _fused_into(sliced(one.node), *arguments)
            else:
                _fused(*arguments)
        for cat in family.unconvolved:
            sliced(cat).clone()

    def several(self, data: tuple[Tensor, dict[Node, Tensor]]) -> None:
        from torch._inductor import config  # slow to import

        family, (_, dense) = self._family, data
        for cat in family.concatenations:
            parts = family.parts_of(cat)
            whole = torch.cat([dense[part] for part in parts], 1)
            if cat in family.unconvolved and len(parts) > config.max_pointwise_cat_inputs:
                whole.clone()
        for one in family.convolutions:
            _fused(*one.arguments(map(dense.get, one.operands)))


def _search(
    problem: ConvProblem, device: torch.device, sampling: str, workspace_limit: int
) -> Search:
    """Returns the search of a problem by the policy of an operator."""
    return problem, device, sampling, None if workspace_limit < 0 else workspace_limit


def _random(node: Node) -> Tensor:
    value = node.meta["val"]
    generator = torch.Generator(value.device).manual_seed(0)
    found = torch.randn(value.shape, dtype=value.dtype, device=value.device, generator=generator)
    if value.dim() < 4:
        return found
    # Products of such a weight do not overflow.
    found *= math.prod(value.shape[1:]) ** -0.5
    return found.contiguous(memory_format=torch.channels_last)


def fuse_judged(graph: GraphModule, groups: Sequence[Group], judge: Judge) -> list[GroupReport]:
    """Fuses the groups of a graph that a judge decides to fuse. If it measures, the engines of the
    other convolutions begin to be compiled, for the first call of the program.

    Returns:
        The report on each group, in their order.
    """
    pairs = [*zip(groups, _verdicts(groups, judge), strict=True)]
    if isinstance(judge, Measured):
        others = [group for group, verdict in pairs if not verdict.fuse]
        compiling_ahead.start_all(_alone(others))
    reports = [
        GroupReport(group.text, group.output_shape, *verdict, _problem_of(group))
        for group, verdict in pairs
    ]
    fuse_groups(graph.graph, [group for group, verdict in pairs if verdict.fuse])
    return reports


def _problem_of(group: Group) -> ConvProblem | None:
    try:
        return group.problem()
    except (ValueError, TypeError):  # the first call reports the fault
        return None


def _verdicts(groups: Sequence[Group], judge: Judge) -> list[Verdict]:
    """Returns the judge's verdict on each group. If it measures them, the engines of all are
    compiled side by side, and groups with compiled engines are measured first."""
    found = [Verdict(False, group.obstacle or "") for group in groups]
    searches: dict[int, Sequence[Search]] = {}
    for number, group in enumerate(groups):
        if group.obstacle is None:
            forms = _forms_of(group) if isinstance(judge, Measured) else ""
            searches[number] = () if isinstance(forms, str) else _searches(forms, judge)
    with compiling_ahead.compiling([search for some in searches.values() for search in some]):
        while searches:
            ready = (number for number, some in searches.items() if _are_ready(some))
            number = next(ready, next(iter(searches)))
            found[number] = judge(groups[number])
            del searches[number]
    return found


def _searches(forms: _GroupForms | _FamilyForms, judge: Judge) -> Sequence[Search]:
    """Returns the searches of both forms, for which a judge waits; none if a verdict is known."""
    is_known = isinstance(judge, Measured) and judge.known(forms) is not None
    return () if is_known else forms.searches


def _alone(groups: Iterable[Group]) -> Iterator[Search]:
    """Yields the searches of the convolutions of groups by themselves."""
    for group in groups:
        if group.marked is group.input or group.device.type != "cuda":
            continue  # it is PyTorch's own
        try:
            alone = replace(group.problem(), bias=False, residual=False, activation="")
        except ValueError:  # the first call reports the fault
            continue
        yield _search(alone, group.device, *group.policy)


def _are_ready(searches: Sequence[Search]) -> bool:
    return all(compiling_ahead.is_ready(problem, device) for problem, device, *_ in searches)


def write_in_place(graph: Graph, judge: Judge, *, channels_last: bool) -> list[ConcatenationReport]:
    """Lets convolutions write into the concatenations of a graph, if a judge decides so.

    Args:
        graph, channels_last: as of :func:`find_families`.
        judge: decides for each family.

    Returns:
        The report on each family, in the graph's order.
    """
    families = find_families(graph, channels_last=channels_last)
    pairs = [(family, judge(family)) for family in families]
    replace_families(graph, [family for family, verdict in pairs if verdict.fuse])
    return [
        ConcatenationReport(len(family.parts), tuple(family.value.shape), *verdict)
        for family, verdict in pairs
    ]


def gain(groups: Iterable[GroupReport]) -> float:
    """Returns the relative increase of a program's time for groups without any fusion, over its
    time with the fused ones; 0 without measurements."""
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
"""Functions that make the judge of a graph, by the option ``fuse``."""
