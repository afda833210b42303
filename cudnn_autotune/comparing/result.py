"""The result of ``compare``: a row for each way, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from cudnn_autotune.comparing.ways import WAYS
from cudnn_autotune.core import versions
from cudnn_autotune.core.display import NONE, Bar, html_table
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.core.json_dataclass import encode

_COLUMNS = (
    *("way", "step, ms", "spread", "speed", "first call, s", "peak, MiB"),
    *("error, output", "error, gradients"),
)


@dataclass(frozen=True)
class Row:
    """The measurement of one way."""

    way: str
    """The way's name, one of the argument ``ways``."""
    code: tuple[str, ...]
    """The way's lines of a program, in which ``inputs`` is the tuple of the model's arguments."""
    step_ms: float | None = None
    """Median milliseconds of a step; None if there is none, for the reason in ``note``."""
    spread: float | None = None
    """Half the interquartile range of the blocks' times, relative to their median."""
    speedup: float | None = None
    """Time of a step of the first measured way, over this one's."""
    first_call_s: float | None = None
    """Seconds of preparing the model (compiling, tuning) and its first step."""
    peak_mib: float | None = None
    """Most memory (MiB) during a step, in tensors and CUDA graphs, weights included; None without a
    GPU."""
    output_error: float | None = None
    """Norm of the difference of the outputs to float32's without TF32, over the latter's norm; None
    if it is unknown, or an element is not finite."""
    gradient_error: float | None = None
    """The same of the gradients of all parameters; None without a backward, too."""
    note: str = ""
    """Choices of the way itself, or the reason why it has no time."""


@dataclass(frozen=True)
class ModelComparison:
    """The result of :func:`cudnn_autotune.compare`: ``print`` and notebooks show it as a table."""

    subject: str
    """The model's class, the step, and the device."""
    rows: tuple[Row, ...]
    """A row for each way, in the order of ``ways``: ``way``, ``code``, ``step_ms``, ``spread``,
    ``speedup``, ``first_call_s``, ``peak_mib``, ``output_error``, ``gradient_error``, ``note``."""
    notes: tuple[str, ...] = ()
    """Limits of the comparison."""
    was_interrupted: bool = False
    """Whether Ctrl-C, or a signal that ends the process, ended it early."""

    @property
    def fastest(self) -> Row | None:
        """The row of the fastest way; None if none could be measured, or not all before an end by
        Ctrl-C."""
        return None if self._left else self._fastest(self.rows)

    @property
    def verdict(self) -> str:
        """A sentence with the fastest way, its gain over PyTorch's best, and the ways within the
        spread of its times; or the ways that an end by Ctrl-C left out."""
        if self._left:
            left = ", ".join(self._left)
            return f"interrupted before these were measured, so the fastest is not known: {left}"
        best = self.fastest
        if best is None or best.step_ms is None:
            return "no way could be measured"
        theirs = self._fastest([row for row in self.rows if not WAYS[row.way].is_ours])
        ours = self._fastest([row for row in self.rows if WAYS[row.way].is_ours])
        other = ours if best is theirs else theirs
        text = f"fastest: {best.way}"
        if other is not None and other.step_ms is not None:
            of = "this package's" if best is theirs else "PyTorch's"
            text += f", {other.step_ms / best.step_ms:.2f} times as fast as {of} best, {other.way}"
        alike = [row.way for row in self.rows if row is not best and _is_alike(row, best)]
        if alike:
            text += f"; by the spread of their times it may as well be {' or '.join(alike)}"
        return text

    @property
    def _left(self) -> list[str]:
        """Names of the ways that were not measured before Ctrl-C."""
        rows = self.rows if self.was_interrupted else ()
        return [row.way for row in rows if row.step_ms is None and not row.note]

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison and the environment as JSON values."""
        made = {**encode(self), "verdict": self.verdict, "environment": versions.environment()}
        return made | {"rows": [vars(row) | encode(row) for row in self.rows]}

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None, force_terminal=True)
        with console.capture() as printed:
            self.show(console)
        return printed.get()

    def show(self, console: Any) -> None:
        """Prints the table on a ``rich.console.Console``, and the lines of code to use. If that is
        no terminal, tabs separate a row's cells."""
        from rich.text import Text

        with IMPORTING:
            from cudnn_autotune.core.table import Table

        columns, *rows = self._lines()
        ending = "\n".join([*self._notes(), self.verdict, *self._code()])
        wraps = console.is_terminal
        console.print(Text(self.subject), soft_wrap=not wraps)
        Table("", columns, rows).show(console)
        console.print(Text(ending), soft_wrap=not wraps)

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self._notes())
        columns, *lines = self._lines()
        longest = max((row.step_ms or 0.0 for row in self.rows), default=0.0)
        bars = [Bar(row.step_ms / longest) if row.step_ms else None for row in self.rows]
        rows = [(*line, bar) for line, bar in zip(lines, bars, strict=True)]
        return (
            f"{html_table(self.subject, rows, (*columns, 'time of a step'))}<ul>{notes}</ul>"
            f"<p>{escape(self.verdict)}</p><pre>{escape(chr(10).join(self._code()))}</pre>"
        )

    def _lines(self) -> list[Sequence[str]]:
        """Returns the columns' names, and the cells of each row, without empty columns."""
        cells = [_cells(row) for row in self.rows]
        shown = [i for i in range(len(_COLUMNS)) if i < 2 or any(c[i] != NONE for c in cells)]
        return [tuple(line[i] for i in shown) for line in (_COLUMNS, *cells)]

    def _notes(self) -> list[str]:
        ended = ["interrupted: times are of what had run until then"] * self.was_interrupted
        return [*ended, *self.notes, *(f"{r.way}: {r.note}" for r in self.rows if r.note)]

    def _code(self) -> tuple[str, ...]:
        return () if self.fastest is None else tuple(f"  {line}" for line in self.fastest.code)

    @staticmethod
    def _fastest(rows: Sequence[Row]) -> Row | None:
        timed = [row for row in rows if row.step_ms is not None]
        return min(timed, key=lambda row: row.step_ms or 0.0, default=None)


def _is_alike(one: Row, other: Row) -> bool:
    """Returns whether the spreads of two ways' times together exceed the times' difference."""
    if one.step_ms is None or other.step_ms is None:
        return False
    spread_ms = one.step_ms * (one.spread or 0.0) + other.step_ms * (other.spread or 0.0)
    return abs(one.step_ms - other.step_ms) < spread_ms


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return NONE if value is None else format(value, form) if value else "0"

    return (
        row.way,
        text(row.step_ms, ".4g"),
        NONE if row.spread is None else f"±{row.spread:.1%}",
        NONE if row.speedup is None else f"{row.speedup:.2f}×",
        text(row.first_call_s, ".3g"),
        text(row.peak_mib, ",.0f"),
        text(row.output_error, ".1e"),
        text(row.gradient_error, ".1e"),
    )
