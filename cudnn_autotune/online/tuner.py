"""The tuner: a background thread that decides the trials of ``online``.

The callers' threads never wait for it: C++ assigns turns and collects their times
(csrc/conv/online_trial.h), and this thread compares them (``online.race``). It only computes, and
keeps its findings for the next process. All work on the GPU is done in the calls
(``preparation.OnlinePreparation``).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.online.race import OnlineRace, TrialRecord
from cudnn_autotune.store import kept_plans
from cudnn_autotune.timers.lacking import NOTHING, Lacking
from cudnn_autotune.tuning import choice_log, remembering
from cudnn_autotune.tuning.checking import OutputChecks
from cudnn_autotune.tuning.choice import Choice, of_search

if TYPE_CHECKING:
    from cudnn_autotune.core.extension import _C

_log = logging.getLogger(__name__)
_OF_A_NEW_SIZE = "a new size of its layer: compared in turns with what was fast on sizes nearby"

_PERIOD_S = 0.01
# The period while no new samples arrive, as between two epochs.
_LONGEST_IDLE_S = 0.16
# The share of a core for the thread: while it computes, it holds Python's lock, which callers need.
# Many trials make its steps rarer, down to a limit.
_SHARE = 0.01
_LONGEST_S = 0.5
# A killed process loses the turns of this time.
_KEEP_EVERY_S = 10.0
# At exit the thread finishes its step, which takes some milliseconds.
_EXIT_S = 10.0


@dataclass(eq=False)
class Prepared:
    """The candidates and checks that a trial's calls have prepared. Calls write it, and the tuner's
    thread reads it.

    It holds no plan, no search and no tensor: those must be freed on a caller's thread.
    """

    joining: deque[Candidate] = field(default_factory=deque)
    """Built and right candidates, in the order in which they join the trial. A candidate is put
    here before it joins."""
    first_fails: str = ""
    """The reason against the first candidate; empty if it is right or not yet checked."""
    lacking: Lacking = NOTHING
    """The resources whose lack left candidates out, and that a later trial may have."""
    left_out: list[Candidate] = field(default_factory=list)
    """Candidates that do not join, eliminated by an earlier process."""
    checks: OutputChecks = field(default_factory=OutputChecks)
    """The checks of the candidates' outputs."""
    remarks: list[str] = field(default_factory=list)
    """Remarks for the evidence."""
    budget_ms: float | None = None
    """The budget in milliseconds if it left candidates out; else None."""
    is_broken: bool = False
    """Whether the preparation ended by an error, which was logged or raised."""
    is_over: bool = False
    """Whether the preparation has ended; set last."""


class OnlineCommitter:
    """The commit of one problem's trial, on the tuner's thread, which must not touch the GPU.

    Args:
        first: the choice that serves until then.
        prepared: the checks of the candidates' outputs, and the lacking resources.
        since: the problem's ``choice_log.generation`` when ``first`` was begun.
    """

    def __init__(self, first: Choice, prepared: Prepared, since: int) -> None:
        self._first = first
        self._prepared = prepared
        self._since = since

    @property
    def is_wanted(self) -> bool:
        """False once the problem was forgotten."""
        return choice_log.generation(self._first.problem) == self._since

    @property
    def chosen_elsewhere(self) -> str | None:
        """The text of the winner of another thread's trial of the same problem."""
        first = self._first
        known = choice_log.find(first.problem, first.policy, first.device)
        if known is None or known.total_samples == 0 or known.lacking:
            return None
        return known.text

    def commit(self, selection: Selection) -> bool:
        """Commits the decision, the chosen candidate first; returns whether it is provisional."""
        first, device, checks = self._first, self._first.device, self._prepared.checks
        if first.origin == "neighbour":
            remarks = (*selection.evidence.remarks, _OF_A_NEW_SIZE)
            selection = replace(selection, evidence=replace(selection.evidence, remarks=remarks))
        winner = selection.winner
        tuning_ms = first.tuning_ms + selection.evidence.wall_ms
        origin = "tuned" if selection.total_samples > 0 else first.origin
        is_unchecked = checks.errors.get(winner.candidate.text, 0.0) is None
        lacks = replace(self._prepared.lacking, check=is_unchecked)
        choice = of_search(first.problem, first.policy, device, selection, checks, winner, lacks)
        choice = replace(choice, origin=origin, tuning_ms=tuning_ms)
        remembering.commit(choice, self._since)
        return bool(lacks)

    def keep(self, record: TrialRecord | None) -> None:
        """Keeps the trial's findings so far for a later process; None removes them."""
        kept_plans.keep_trial(*self._name, record and record.to_json())

    def earlier(self) -> TrialRecord:
        """Returns an earlier process's findings on the same problem without a decision."""
        tree = kept_plans.find_trial(*self._name)
        try:
            return TrialRecord() if tree is None else TrialRecord.from_json(tree)
        except Exception as error:  # any record: a call is served
            _log.info("%s: its trial begins again: %s", self._first.problem.text, shown(str(error)))
            return TrialRecord()

    @property
    def _name(self) -> tuple[str, str, int]:
        first = self._first
        limits = f"benchmark_limit={first.benchmark_limit} workspace_limit={first.workspace_limit}"
        return first.problem.text, f"{first.origin} {limits}", first.device


@dataclass(eq=False)
class Trial:
    """One problem, while its callers' calls decide."""

    schedule: _C.TurnSchedule
    first: Candidate
    committer: OnlineCommitter
    prepared: Prepared
    earlier: TrialRecord = field(default_factory=TrialRecord)
    """The record of an earlier process's trial of the same problem."""
    race: OnlineRace = field(init=False)
    is_idle: bool = False
    """Whether the last step found nothing to do."""

    def __post_init__(self) -> None:
        self.race = OnlineRace([self.first], earlier=self.earlier)
        if not self.race.active:
            self.schedule.drop(0)
        self._start = time.perf_counter()
        self._judge_at = 0
        self._chosen: int | None = None
        self._kept_s, self._kept_turns = time.monotonic(), self.race.turns

    def step(self) -> bool:
        """Reads and judges new samples; returns False once the trial is over."""
        if not self.committer.is_wanted:
            # Callers have usually released the trial by now, unless it began while its problem was
            # being forgotten.
            self.schedule.decide(self.race.next_best() or 0)
            return False
        is_in_use = self.schedule.is_in_use
        is_over = self.prepared.is_over  # read first: every candidate has then joined
        self.is_idle = not self._read()
        if not is_in_use:
            self.keep()
            return False
        if self._adopt():
            return False
        if self.prepared.is_broken:
            self.keep()
            if 0 in self.race.failed:
                self.end_undecided()
            else:
                self.schedule.decide(0)
            return False
        chosen = self._judge()
        leader = None if self.is_idle else self.race.leader()
        if leader is not None:
            self.schedule.set_leader(leader)
        if chosen is not None and is_over:
            self._commit(chosen)
            return False
        if is_over and (len(self.race.candidates) == 1 or not self.race.active):
            self.end_undecided()
            self.committer.keep(None)
            return False
        if chosen is not None:
            self._wait_with(chosen)
        if time.monotonic() - self._kept_s > _KEEP_EVERY_S:
            self.keep()
        return True

    def keep(self) -> None:
        """Keeps the findings since the last time."""
        self._kept_s = time.monotonic()
        if self.race.turns > self._kept_turns:
            self._kept_turns = self.race.turns
            self.committer.keep(self.race.record())

    def _commit(self, chosen: int) -> None:
        wall_ms = (time.perf_counter() - self._start) * 1e3
        prepared = self.prepared
        self._note_memory()
        is_provisional = self.committer.commit(
            self.race.selection(
                chosen, wall_ms, prepared.remarks, prepared.budget_ms, prepared.left_out
            )
        )
        self.schedule.decide(chosen, is_provisional)
        self.committer.keep(None)

    def _wait_with(self, chosen: int) -> None:
        """Lets ``chosen`` serve every call until another candidate joins."""
        self.schedule.rest(len(self.race.candidates))
        for number in self.race.active - {chosen}:
            self.schedule.drop(number)
        self.race.settle(chosen)

    def end_undecided(self) -> None:
        """Ends a trial that cannot decide, with its first candidate, else the best one that has not
        failed, else PyTorch's own path."""
        stays = 0 in self.race.active
        left = 0 if stays else self.race.next_best()
        remarks = tuple(self.prepared.remarks)
        self._note_memory()
        if stays and not remarks and not self.prepared.lacking:
            self.schedule.decide(left)
            return  # its choice is committed already
        candidate = OWN_PATH if left is None else self.race.candidates[left]
        rule = "the first stays" if stays else "the others fail"
        evidence = Evidence(
            rule=rule,
            tied=(candidate.text,),
            remarks=remarks,
            budget_ms=self.prepared.budget_ms,
        )
        is_provisional = self.committer.commit(
            Selection((Measurement(candidate, None, 0),), self.race.turns, evidence)
        )
        self.schedule.decide(left, is_provisional)

    def _note_memory(self) -> None:
        """Notes the candidates that failed in a turn because memory was short."""
        if self.schedule.ran_out_of_memory:
            for number in self.race.failed:
                need = max(1, self.race.candidates[number].workspace_bytes)
                self.prepared.lacking = self.prepared.lacking.and_memory(need)

    def _adopt(self) -> bool:
        """Ends the trial with another thread's decision, if that candidate runs here."""
        text = self.committer.chosen_elsewhere
        for number, candidate in enumerate(self.race.candidates):
            if candidate.text == text and number not in self.race.failed:
                self.schedule.decide(number)
                return True
        return False

    def _read(self) -> bool:
        """Reads the calls' new samples, failures and candidates; returns whether there are any."""
        samples, count = self.schedule.take_samples(), self.schedule.implementation_count
        failures = set(self.schedule.failures()) - self.race.failed
        first_fails = bool(self.prepared.first_fails) and 0 not in self.race.failed
        joining = count - len(self.race.candidates)
        self.race.join([self.prepared.joining.popleft() for _ in range(joining)])
        if first_fails:
            self._fail(0, self.prepared.first_fails)
        self.race.add(samples)
        for number in failures:
            self.race.fail(number, "failed")
        if failures and not self.race.active:
            self.race.revive()
        if failures or joining:
            self._judge_at, self._chosen = 0, None
        return bool(samples or failures or joining or first_fails)

    def _judge(self) -> int | None:
        """Judges the race after enough new turns; returns the decision's number, if any."""
        if self._chosen is not None or self.race.turns < self._judge_at:
            return self._chosen
        before = self.race.active
        self._chosen = self.race.judge()
        self._judge_at = self.race.turns + self.race.turns_to_next_look()
        for number in before - self.race.active:
            self.schedule.drop(number)
        return self._chosen

    def _fail(self, number: int, why: str) -> None:
        self.race.fail(number, why)
        self.schedule.fail(number)
        self._judge_at, self._chosen = 0, None


def next_period_s(last_s: float, is_idle: bool, spent_s: float, trials: int) -> float:
    """Returns the seconds of sleep after steps of all trials with ``spent_s`` seconds of CPU
    time."""
    wanted_s = min(2 * last_s, _LONGEST_IDLE_S) if is_idle else _PERIOD_S
    return max(wanted_s, min(spent_s / _SHARE, trials * _PERIOD_S, _LONGEST_S))


class OnlineTuner:
    """The thread that steps all trials, and runs while there are any."""

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Forgets all trials: a forked process has neither their calls nor the thread."""
        self._lock = threading.Lock()
        self._trials: list[Trial] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, trial: Trial) -> None:
        """Adds a trial to the thread's steps.

        Raises:
            RuntimeError: the system gives no thread. The trial is then not added.
        """
        with self._lock:
            if self._stopped.is_set():
                return  # the process is exiting, and the first candidate serves
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="cudnn_autotune-online", daemon=True
                )
                thread.start()
                self._thread = thread
            self._trials.append(trial)

    @property
    def undecided(self) -> int:
        """The number of undecided problems."""
        with self._lock:
            return len(self._trials)

    @property
    def preparing(self) -> int:
        """The number of problems whose calls still prepare candidates."""
        with self._lock:
            return sum(not trial.prepared.is_over for trial in self._trials)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all steps so far: callers' longest possible wait for Python's lock."""
        return self._cpu_s

    def stop(self) -> None:
        """Ends the thread for good, before the interpreter is finalised at exit, and keeps the
        trials' findings."""
        self._stopped.set()
        with self._lock:
            thread, trials = self._thread, list(self._trials)
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_EXIT_S)
        for trial in trials if not thread.is_alive() else []:
            if self._step(trial):
                trial.keep()

    def _run(self) -> None:
        period_s = _PERIOD_S
        while not self._stopped.wait(period_s):
            with self._lock:
                trials = list(self._trials)
                if not trials:
                    self._thread = None
                    return
            begin_s = time.thread_time()
            for trial in trials:
                if self._stopped.is_set():
                    return
                if not self._step(trial):
                    with self._lock:
                        self._trials.remove(trial)
            is_idle = all(trial.is_idle for trial in trials)
            spent_s = time.thread_time() - begin_s
            self._cpu_s += spent_s
            period_s = next_period_s(period_s, is_idle, spent_s, len(trials))
            # Trials that are over are freed before the next sleep.
            del trial, trials

    def _step(self, trial: Trial) -> bool:
        try:
            return trial.step()
        except Exception:
            # An error must not reach callers, who are served in any case, so it is logged.
            why = traceback.format_exc()  # the error itself would keep its frames
            _log.error("online: gave up on a problem; its first plan stays\n%s", why)
        try:
            trial.end_undecided()
        except Exception:
            _log.error("online: no more calls are timed\n%s", traceback.format_exc())
        return False


TUNER = OnlineTuner()
atexit.register(TUNER.stop)
