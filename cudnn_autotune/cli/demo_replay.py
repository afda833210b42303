"""The demo's part that needs no GPU: every mode on the recordings that the package ships."""

from __future__ import annotations

import statistics
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, report
from cudnn_autotune.audit.analysis import regret, truth_of
from cudnn_autotune.audit.model import BURST, SUSTAINED, Record
from cudnn_autotune.audit.summary import geometric_mean
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers import recordings
from cudnn_autotune.timers.offline.recording import ENVIRONMENT

_RUNS = 10
_BAR_WIDTH = 12
_LEAST_BAR = 0.05
"""The least regret that a full bar stands for."""


@dataclass(frozen=True)
class Row:
    """The picks of one mode in all of its runs on a recording."""

    mode: str
    text: str
    """The candidate that it picked most often."""
    often: int
    """The number of runs in which it picked that one."""
    burst: float | None
    """Geometric mean of its picks' regrets in bursts (1: the best); None where it is unknown."""
    sustained: float | None
    """The same for sustained times."""
    tuning_ms: float
    """Median over the runs."""


def replay() -> Record:
    """Runs every mode ten times on every shipped recording, which takes some seconds."""
    cases = [offline_cases.RecordedCase.shipped(name) for name in recordings.names()]
    environments = [case.recording.environment for case in cases]
    # The environment that all recordings share, with the latest of their dates.
    shared = {
        name: environments[0][name]
        for name in ENVIRONMENT
        if len({environment[name] for environment in environments}) == 1
    }
    shared["date"] = max(str(environment["date"]) for environment in environments)
    modes = sampling.names()
    record = Record("replay", settings={"modes": list(modes), "runs": _RUNS}, environment=shared)
    offline_cases.audit(record, cases, dict.fromkeys(modes, _RUNS), limits=Limits())
    return record


def show(console: Console, replayed: Record) -> None:
    """Prints a table for each recording."""
    for case, described in replayed.cases.items():
        found = rows(replayed, case)
        console.print(_table(case, described["gpu"], described["problem"], found))
        for text, letter in _letters(found).items():
            console.print(Text(f"  {letter}: {text}"))
    if warning := report.without_power(replayed):
        console.print(Text(warning))


def rows(record: Record, case: str) -> list[Row]:
    found = []
    truths = [truth_of(record.oracle[case], name) for name in (BURST, SUSTAINED)]
    for mode, runs in record.picks.items():
        picks = [by_case[case] for by_case in runs.values()]
        texts = [pick.text for pick in picks if pick.text]
        if not texts:
            continue
        text, often = Counter(texts).most_common(1)[0]
        by_truth = [[regret(truth, t) for t in texts] for truth in truths]
        known = [[value for value in values if value is not None] for values in by_truth]
        burst, sustained = (geometric_mean(values) if values else None for values in known)
        tuning_ms = statistics.median(pick.tuning_ms or 0.0 for pick in picks)
        found.append(Row(mode, text, often, burst, sustained, tuning_ms))
    return found


def _table(case: str, gpu: str, problem: str, found: Sequence[Row]) -> Table:
    """Returns the table; modes that mostly chose the same engine are adjacent. Bars show
    regrets."""
    title = f"{case}, replayed from {gpu}, {_RUNS} runs a mode: {problem}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("engine", justify="center", no_wrap=True)
    for column in ("picked", "burst", "sustained"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("slower than the best", max_width=_BAR_WIDTH)  # this column may shrink
    table.add_column("tuning,\nms", justify="right", no_wrap=True)
    longest = max([_LEAST_BAR, *(_shown(row) for row in found)])
    for text, letter in _letters(found).items():
        for row in [row for row in found if row.text == text]:
            table.add_row(
                row.mode,
                letter,
                f"{row.often} of {_RUNS}",
                _percent(row.burst),
                _percent(row.sustained),
                Bar(longest, 0, _shown(row)),
                f"{row.tuning_ms:.0f}",
            )
        table.add_section()
    return table


def _letters(found: Sequence[Row]) -> dict[str, str]:
    """A name for each engine config, short enough for a column."""
    return dict(zip(dict.fromkeys(row.text for row in found), string.ascii_uppercase, strict=False))


def _shown(row: Row) -> float:
    """The regret that the bar shows: the sustained one, or the burst one if that is unknown."""
    value = row.burst if row.sustained is None else row.sustained
    return 0.0 if value is None else value - 1


def _percent(value: float | None) -> str:
    return "" if value is None else f"+{100 * (value - 1):.1f} %"
