"""An audit in fresh processes: which process gets which cases, and for how long.

There is one process for each mode and run, one for each of PyTorch's modes, and one for the oracle
at the end. A process gets the cases that all processes before it have done, and a share of the time
that is left, but does one case at least. So a time limit cuts off cases and not modes, and the next
session goes on with what it cut off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cudnn_autotune.audit.judged_turns import SOLO, OracleSettings, Solo
from cudnn_autotune.audit.model import BURST, PYTORCH_MODES, Oracle, Pick, PytorchRow, Record
from cudnn_autotune.audit.summary import truth_of
from cudnn_autotune.tools import (
    CaseFailure,
    Process,
    ProcessFailure,
    decode,
    encode,
    started_ahead,
)

ORACLE = "oracle"
START_S = 6.0
"""Seconds that a process takes before its first case."""
# Seconds of a case on an H200.
_SECONDS = {
    ORACLE: 1.0,
    "auto": 1.0,
    "heuristic": 0.05,
    "sustained": 5.0,
    **dict.fromkeys(PYTORCH_MODES, 0.5),
}
_OTHER_MODES_S = 0.6
# Added where steady times are measured and the board throttles.
_SECONDS_ALONE = {ORACLE: 5.0, **dict.fromkeys(PYTORCH_MODES, 3.5)}


@dataclass(frozen=True)
class AuditConfig:
    """The configuration of an audit in fresh processes."""

    runs: Mapping[str, int]
    """Number of runs of each of our modes."""
    pytorch: Sequence[str]
    """Names of ``model.PYTORCH_MODES``."""
    reference: str
    """The mode, one of ``runs``, with whose first pick PyTorch is compared."""
    oracle: OracleSettings = field(default_factory=OracleSettings)
    budget_ms: float | None = None
    """The most milliseconds that a choice may take; None stands for no limit."""
    time_limit_s: float | None = None
    """About the most seconds that one session may take; None stands for no limit."""
    case_limit_s: float = 60.0
    """Most seconds of a process for a case; a slower one is killed, and the case counts as
    failed."""
    modules: Sequence[str] = ()
    """Modules that every process imports first: they may register modes."""
    backend: str = "cudnn_autotune.audit.gpu"
    """The module whose ``open_backend`` makes what does the work in a process (see ``worker``)."""


@dataclass(frozen=True)
class Step:
    """One process of an audit."""

    mode: str
    """One of our modes, one of PyTorch's, or ``oracle``."""
    run: int = 1

    @property
    def name(self) -> str:
        return self.mode if self.task != "pick" else f"{self.mode}#{self.run}"

    @property
    def task(self) -> str:
        """The process's task: ``pick``, ``pytorch`` or ``oracle``."""
        if self.mode == ORACLE:
            return ORACLE
        return "pytorch" if self.mode in PYTORCH_MODES else "pick"

    def seconds_of_case(self, solo: Solo) -> float:
        """Wall seconds of one case, about."""
        seconds = _SECONDS.get(self.mode, _OTHER_MODES_S)
        return seconds if solo == "never" else seconds + _SECONDS_ALONE.get(self.mode, 0.0)


def steps(config: AuditConfig) -> list[Step]:
    """Returns the processes in their order.

    The reference comes first, PyTorch after the first runs, and the oracle last. Every other run
    goes through the modes backwards, so that no mode is always late.
    """
    modes = sorted(config.runs, key=lambda mode: mode != config.reference)
    found = [Step(mode) for mode in modes] + [Step(mode) for mode in config.pytorch]
    for run in range(2, max(config.runs.values(), default=0) + 1):
        order = modes[::-1] if run % 2 == 0 else modes
        found += [Step(mode, run) for mode in order if run <= config.runs[mode]]
    return [*found, Step(ORACLE)]


_LEAST_S = 1.0
_SAVE_EVERY_S = 10.0
# The number of processes lost at a step after which the session gives up its other cases.
_MOST_LOST = 3

Report = Callable[[str], None]
Row = Pick | PytorchRow | Oracle


class Session:
    """Works through the cases of ``record`` that are not complete.

    Args:
        config: the audit's configuration.
        record: the record, which is continued in place.
        wanted: ids of the cases to do, of those that the record describes.
        save: saves the record; it is called every few cases.
        report: receives lines of progress.
    """

    def __init__(
        self,
        config: AuditConfig,
        record: Record,
        wanted: Sequence[str],
        save: Callable[[], None] = lambda: None,
        report: Report = lambda line: None,
    ) -> None:
        self.config = config
        self.record = record
        self.steps = steps(config)
        self._process = partial(Process, modules=[config.backend, *config.modules])
        self._save = save
        self._report = report
        self._begin = self._saved = time.monotonic()
        self.wanted = list(wanted)

    def run(self) -> None:
        """Measures the cases until the time limit. Raises ProcessFailure if not even the first
        process of the session can be set up."""
        eligible = [case for case in self.wanted if not self.is_complete(case)]
        todo = [step for step in self.steps if any(self._lacks(step, case) for case in eligible)]
        try:
            with closing(started_ahead([s.name for s in todo], self._process)) as processes:
                for index, (step, process) in enumerate(zip(todo, processes, strict=True)):
                    if self._left_s() > _LEAST_S:
                        self._work(todo[index:], process, eligible, is_first=index == 0)
                    eligible = [case for case in eligible if not self._lacks(step, case)]
                    if not eligible:
                        break
        finally:
            self.record.complete = all(self.is_complete(case) for case in self.record.cases)
            self._save()

    def is_complete(self, case: str) -> bool:
        """Whether the record has all of a case that the audit asks for."""
        return not any(self._lacks(step, case) for step in self.steps)

    def _rows(self, step: Step) -> Mapping[str, Row]:
        """Returns the record's rows of a step, by case."""
        if step.task == ORACLE:
            return self.record.oracle
        if step.task == "pytorch":
            return self.record.pytorch.get(step.mode, {})
        return self.record.picks.get(step.mode, {}).get(str(step.run), {})

    def _keep(self, step: Step, case: str, row: Row) -> None:
        if isinstance(row, Oracle):
            self.record.oracle[case] = row
        elif isinstance(row, PytorchRow):
            self.record.pytorch.setdefault(step.mode, {})[case] = row
        else:
            by_run = self.record.picks.setdefault(step.mode, {})
            by_run.setdefault(str(step.run), {})[case] = row

    def _lacks(self, step: Step, case: str) -> bool:
        row = self._rows(step).get(case)
        if row is None or isinstance(row, Pick) or row.error:
            return row is None
        if SOLO.index(row.solo) < SOLO.index(self.config.oracle.solo):
            return True
        if not isinstance(row, Oracle):
            return False
        # An oracle that came before a pick may not know it.
        truth = truth_of(row, BURST)
        known = {*row.failed, *(truth.times_ms if truth else ())}
        return not known.issuperset(self.record.picks_of(case))

    def _left_s(self) -> float:
        """Returns the seconds that are left of the time limit."""
        if self.config.time_limit_s is None:
            return math.inf
        return self.config.time_limit_s - (time.monotonic() - self._begin)

    def _share(self, counts: Mapping[Step, int]) -> float:
        """Returns the part of the time left that the first of the steps to come needs beside the
        others, given how many cases each of them is to do."""
        solo = self.config.oracle.solo
        needs = [START_S + s.seconds_of_case(solo) * n for s, n in counts.items()]
        return needs[0] / sum(needs)

    def _work(
        self, left: Sequence[Step], process: Process, eligible: Sequence[str], is_first: bool
    ) -> None:
        """Does the first of the steps that are left."""
        step = left[0]
        begin, left_s = time.monotonic(), self._left_s()
        counts = {s: sum(self._lacks(s, case) for case in eligible) for s in left}
        cases = [case for case in eligible if self._lacks(step, case)]
        done = lost = 0
        while cases and lost < _MOST_LOST:
            if lost:
                process = self._process(step.name)
            try:
                self._set_up(process, step)
                is_first = False
                while cases and (
                    not done or time.monotonic() - begin < left_s * self._share(counts)
                ):
                    self._one(step, process, cases.pop(0))
                    done += 1
                process.leave()
                break
            except ProcessFailure as failure:
                if is_first:
                    raise
                self.record.failures.append(str(failure))
                self._report(str(failure))
                lost += 1
            except BaseException:
                process.close()
                raise
        took_s = time.monotonic() - begin
        self._report(f"{step.name}: {done} cases in {took_s:.1f} s, {len(cases)} left")
        self._save()

    def _set_up(self, process: Process, step: Step) -> None:
        process.set_up(
            {
                "backend": self.config.backend,
                "name": step.name,
                "mode": step.mode,
                "budget_ms": self.config.budget_ms,
                "oracle": encode(self.config.oracle),
            }
        )

    def _one(self, step: Step, process: Process, case: str) -> None:
        """Does one case, and records its result or the error. Raises ProcessFailure if the process
        died or hung at the case, which then counts as failed."""
        kind: type[Row] = {ORACLE: Oracle, "pytorch": PytorchRow}.get(step.task, Pick)
        try:
            request = {"task": step.task, "case": self.record.cases[case]}
            result = process.ask(request | self._more(step, case), self.config.case_limit_s)
            row = decode(kind, result, f"{step.name}, {case}")
        except (CaseFailure, ValueError) as error:  # ValueError: the answer is not a valid row
            row = kind(error=str(error))
        except ProcessFailure as error:
            self._keep(step, case, kind(error=str(error)))
            raise
        self._keep(step, case, row)
        if time.monotonic() - self._saved > _SAVE_EVERY_S:
            self._save()
            self._saved = time.monotonic()

    def _more(self, step: Step, case: str) -> dict[str, Any]:
        """Returns what a task needs in addition to the case. Raises CaseFailure if that is
        unknown."""
        if step.task == ORACLE:
            return {"picked": self.record.picks_of(case)}
        if step.task == "pytorch":
            pick = self.record.picks[self.config.reference]["1"][case]
            if pick.text is None:
                raise CaseFailure(f"{self.config.reference} picked nothing: {pick.error}")
            return {"reference": pick.text}
        return {}
