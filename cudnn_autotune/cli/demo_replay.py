"""The demo's part that needs no GPU: every mode on recordings of an H200, and on a simulated L4."""

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
from cudnn_autotune.audit import report, scenes
from cudnn_autotune.audit.analysis import regret, truth_of
from cudnn_autotune.audit.model import BURST, SUSTAINED, Record
from cudnn_autotune.audit.summary import geometric_mean
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers import recordings
from cudnn_autotune.timers.offline import simulated
from cudnn_autotune.timers.offline.recording_format import ENVIRONMENT

_RUNS = 10
_SIMULATED = "forum-l4"
_SIMULATED_RUNS = 20
_BAR_WIDTH = 12
_LEAST_BAR = 0.05
"""Regret of the longest bar, where none is larger."""


@dataclass(frozen=True)
class Row:
    """What a mode did on a recording, in all of its runs."""

    mode: str
    text: str
    """What it picked most often."""
    often: int
    burst: float | None
    """Geometric mean of its picks' regrets (1: the best); None where that is not known."""
    sustained: float | None
    tuning_ms: float
    """Median."""


def replay() -> Record:
    """Ten runs of every mode on every shipped recording; some seconds."""
    found: list[scenes.Scene] = []
    environments = []
    for name in recordings.names():
        scene = scenes.RecordedScene.shipped(name)
        found.append(scene)
        environments.append(scene.recording.environment)
    # What all recordings share; of the dates, the latest.
    shared = {
        name: environments[0][name]
        for name in ENVIRONMENT
        if len({environment[name] for environment in environments}) == 1
    }
    shared["date"] = max(str(environment["date"]) for environment in environments)
    return _audited("replay", found, _RUNS, shared)


def simulate() -> Record:
    """Twenty runs of every mode on a simulation of the forum's L4."""
    return _audited("simulate", [scenes.SimulatedScene(_SIMULATED)], _SIMULATED_RUNS, {})


def _audited(
    kind: str,
    found: Sequence[scenes.Scene],
    runs: int,
    environment: dict[str, str | int | float | None],
) -> Record:
    modes = sampling.names()
    record = Record(kind, settings={"modes": list(modes), "runs": runs}, environment=environment)
    scenes.audit(record, found, dict.fromkeys(modes, runs), limits=Limits())
    return record


def show(console: Console, replayed: Record, forum: Record) -> None:
    for case, described in replayed.cases.items():
        found = rows(replayed, case)
        console.print(_table(case, described["gpu"], described["problem"], found))
        for text, letter in _letters(found).items():
            console.print(Text(f"  {letter}: {text}"))
    if told := report.without_power(replayed):
        console.print(Text(told))
    console.print(_pair(forum))


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
    """The modes that mostly chose the same engine together; a bar of the sustained regret."""
    title = f"{case}, replayed from {gpu}, {_RUNS} runs a mode: {problem}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("engine", justify="center", no_wrap=True)
    for column in ("picked", "burst", "sustained"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("slower than the best", max_width=_BAR_WIDTH)  # the one that may shrink
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
    """What the bar shows: the sustained regret, or the burst one where that is not known."""
    value = row.burst if row.sustained is None else row.sustained
    return 0.0 if value is None else value - 1


def _percent(value: float | None) -> str:
    return "" if value is None else f"+{100 * (value - 1):.1f} %"


def _pair(record: Record) -> Text:
    timer = simulated.preset(_SIMULATED)
    burst, alone = timer.truth("burst"), timer.truth("sustained")
    winners = (min(burst, key=burst.__getitem__), min(alone, key=alone.__getitem__))
    pair = ", ".join(f"{t} {burst[t]:.2f} and then {alone[t]:.2f} ms" for t in winners)
    by_text: dict[str, list[str]] = {}
    for mode, runs in record.picks.items():
        picked = Counter(by_case[_SIMULATED].text or "none" for by_case in runs.values())
        for text, count in picked.items():
            by_text.setdefault(text, []).append(f"{mode} ({count})")
    told = "; ".join(f"{text} by {', '.join(modes)}" for text, modes in by_text.items())
    return Text(
        f"A simulation of the forum's L4 of 72 W ({pair}), {_SIMULATED_RUNS} runs a mode: "
        f"taken were {told}."
    )
