"""The record of a compiled graph, and the names of its programs."""

from __future__ import annotations

from dataclasses import dataclass, field

from cudnn_autotune.compile.concatenations import ConcatenationReport
from cudnn_autotune.compile.groups import GroupReport
from cudnn_autotune.compile.norms import NormReport
from cudnn_autotune.core.display import html_table

OURS, PLAIN, FROZEN = "cudnn_autotune", "inductor", "inductor, frozen"
EAGER = "pytorch"


@dataclass
class Compilation:
    """The backend's record of one graph."""

    mode: str
    """``"inference"``, ``"training"``, or ``"plain"``: Inductor's own, for a reason in ``note``."""
    groups: list[GroupReport] = field(default_factory=list)
    """Convolutions of an inference graph, or of a forward in training, in its order."""
    concatenations: list[ConcatenationReport] = field(default_factory=list)
    """Concatenations of an inference graph that convolutions could write in place, in its order."""
    norms: list[NormReport] = field(default_factory=list)
    """Batch norms in training mode of a training graph, in its order."""
    is_frozen: bool = False
    """Whether weights are constants of the program, with batch norms folded into convolutions."""
    times_ms: dict[str, float] = field(default_factory=dict)
    """Median milliseconds of a call by program, if they were compared. They are
    ``"cudnn_autotune"`` and ``"inductor"``; or ``"pytorch"``, the graph without a compiler, if the
    groups or the convolutions alone show that plain Inductor is slower. ``freezing`` adds
    ``"inductor, frozen"``. ``memory_format="auto"`` adds the program in the other layout,
    ``"cudnn_autotune, contiguous"`` or ``"cudnn_autotune, channels_last"``. Of a training graph
    they are ``"cudnn_autotune"``, ``"cudnn_autotune, PyTorch's norms"``, and one in another layout;
    or that and ``"pytorch"``, if its convolutions alone show that others are slower. The times are
    those of a step."""
    gpu_times_ms: dict[str, float] = field(default_factory=dict)
    """Median milliseconds of the GPU's part of a call by program, if they were compared on one."""
    source: str = "tuned"
    """Source of the times: ``tuned`` (by this process), or ``store`` (by an earlier one)."""
    chosen: str = OURS
    """Program that runs."""
    chosen_in_captures: str = OURS
    """Program that runs while the caller captures a CUDA graph, in which no host takes part."""
    note: str = ""
    """Remarks, such as the reason for Inductor's own program or for the layout."""

    @property
    def fused(self) -> list[GroupReport]:
        """The groups that were fused."""
        return [group for group in self.groups if group.is_fused]

    def _parts(self) -> list[str]:
        """Returns the counts of the graph's parts in words."""
        parts = []
        if self.groups:
            parts.append(f"{len(self.fused)} of {len(self.groups)} convolutions fused")
        if self.concatenations:
            in_place = sum(one.is_in_place for one in self.concatenations)
            parts.append(f"{in_place} of {len(self.concatenations)} concatenations in place")
        if self.norms:
            served = sum(norm.is_served for norm in self.norms)
            parts.append(f"{served} of {len(self.norms)} batch norms served")
        return parts

    def _row(self) -> tuple[str, ...]:
        """Returns the cells of the graph's row in a table."""
        times = ", ".join(f"{name}: {ms:.4g}" for name, ms in self.times_ms.items())
        return (self.mode, ", ".join(self._parts()), self.chosen, times, self.note)

    def __repr__(self) -> str:
        parts = [self.mode, *self._parts(), f"runs {self.chosen}"]
        if self.chosen_in_captures != self.chosen:
            parts.append(f"in captures {self.chosen_in_captures}")
        parts += [f"{name}: {ms:.4g} ms" for name, ms in self.times_ms.items()]
        parts += ["times from the store"] * (self.source == "store")
        return f"Compilation({'; '.join([*parts, *filter(None, [self.note])])})"

    def __str__(self) -> str:
        parts = (*self.groups, *self.concatenations, *self.norms)
        return "\n".join([repr(self), *map(str, parts)])

    def _repr_html_(self) -> str:
        times = [(f"{name}, ms a call", f"{ms:.4g}") for name, ms in self.times_ms.items()]
        parts: list[tuple[str, object]] = [("convolution", group) for group in self.groups]
        parts += [("concatenations", one) for one in self.concatenations]
        parts += [("batch norm", norm) for norm in self.norms]
        return html_table(repr(self), [*times, *parts])
