"""Carries out ``online``: reads its candidates' turns on a thread of its own, and decides.

The callers' threads never wait for it: C++ gives turns and keeps their times
(csrc/online_trial.h), this thread judges them (``sampling.online_race``). It does arithmetic only.
Whatever needs the GPU is done in the calls (``online_calls.OnlinePreparation``): cuDNN captures
streams of its own when it builds and runs plans, and a ``torch.cuda.synchronize()`` of any other
thread fails meanwhile ("operation not permitted when stream is capturing").
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.online_race import OnlineRace

if TYPE_CHECKING:
    from cudnn_autotune import _C

_log = logging.getLogger(__name__)

_PERIOD_S = 0.01
# Where nothing happens, as between two epochs.
_LONGEST_IDLE_S = 0.16
# What the thread computes costs the callers Python's lock: with many trials it looks less often, so
# that it takes this share of a core, but not so seldom that decisions come late.
_SHARE = 0.01
_LONGEST_S = 0.5
# At exit a step is waited for, some milliseconds.
_EXIT_S = 10.0


class Policy(Protocol):
    """What a trial asks and tells; called on the tuner's thread, which must not touch the GPU."""

    @property
    def is_wanted(self) -> bool:
        """False after ``forget()``."""

    @property
    def chosen_elsewhere(self) -> str | None:
        """What another thread's trial of the same problem has chosen."""

    def tell(self, selection: Selection) -> None:
        """The outcome."""


@dataclass(eq=False)
class Prepared:
    """What the calls of a trial have prepared so far: they write it, the tuner's thread reads it.

    It holds no plan, no search and no tensor: the last to let go of those must be a caller.
    """

    joining: deque[Candidate] = field(default_factory=deque)
    """Candidates that are built and right, in the order in which they join; put here before they
    do."""
    first_fails: str = ""
    """Why the first one cannot be chosen; empty: it is right, or not checked yet."""
    errors: dict[str, float | None] = field(default_factory=dict)
    """Of each one that was checked, by its text: as ``checking.relative_error``."""
    rejected: list[tuple[str, float]] = field(default_factory=list)
    """Those of them that are wrong."""
    remarks: list[str] = field(default_factory=list)
    """What the evidence should say of it."""
    budget_ms: float | None = None
    """The budget, where it left candidates out."""
    is_broken: bool = False
    """Whether it ended by an error, which was logged or raised."""
    is_over: bool = False
    """Whether nothing more is to come; set last."""


@dataclass(eq=False)
class Trial:
    """One problem that is being decided in its callers' calls."""

    schedule: _C.TurnSchedule
    first: Candidate
    policy: Policy
    prepared: Prepared
    race: OnlineRace = field(init=False)
    is_idle: bool = False
    """Whether the last step found nothing to do."""

    def __post_init__(self) -> None:
        self.race = OnlineRace([self.first])
        self._start = time.perf_counter()
        self._judge_at = 0

    def step(self) -> bool:
        """Does what there is to do; False once it is over."""
        if not self.schedule.is_in_use:
            return False
        if not self.policy.is_wanted:
            # Mostly nobody has it any more; it may also have been made while all was forgotten.
            self.schedule.decide(self.race.next_best() or 0)
            return False
        is_over = self.prepared.is_over  # asked first: all that joins has then joined
        self.is_idle = not self._read()
        if self._adopt():
            return False
        if self.prepared.is_broken:
            if 0 in self.race.failed:
                self.settle()
            else:
                self.schedule.decide(0)
            return False
        chosen = self._judge()
        if not is_over:
            return True
        if chosen is not None:
            wall_ms = (time.perf_counter() - self._start) * 1e3
            prepared = self.prepared
            self.policy.tell(
                self.race.selection(chosen, wall_ms, prepared.remarks, prepared.budget_ms)
            )
            self.schedule.decide(chosen)
            return False
        if len(self.race.candidates) == 1 or not self.race.active:
            self.settle()
            return False
        return True

    def settle(self) -> None:
        """Ends what cannot be decided: the first stays, or who is left, or PyTorch's own path."""
        stays = 0 in self.race.active
        left = 0 if stays else self.race.next_best()
        self.schedule.decide(left)
        remarks = tuple(self.prepared.remarks)
        if stays and not remarks:
            return  # what was said of it stands, too
        candidate = ATEN if left is None else self.race.candidates[left]
        rule = "the first stays" if stays else "the others fail"
        evidence = Evidence(
            rule=rule,
            tied=(candidate.text,),
            remarks=remarks,
            budget_ms=self.prepared.budget_ms,
        )
        self.policy.tell(Selection((Measurement(candidate, None, 0),), self.race.turns, evidence))

    def _adopt(self) -> bool:
        """Ends with what another thread has decided, if it is among those that run here."""
        text = self.policy.chosen_elsewhere
        for number in self.race.active:
            if self.race.candidates[number].text == text:
                self.schedule.decide(number)
                return True
        return False

    def _read(self) -> bool:
        """Takes what the calls have left; False where that is nothing."""
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
        return bool(samples or failures or joining or first_fails)

    def _judge(self) -> int | None:
        """What the turns say, where enough are new: the choice's number once there is one."""
        if self.race.turns < self._judge_at:
            return None
        before = set(self.race.active)
        chosen = self.race.judge()
        self._judge_at = self.race.turns + self.race.turns_to_next_look()
        for number in before - self.race.active:
            self.schedule.drop(number)
        leader = self.race.leader()
        if leader is not None:
            self.schedule.set_leader(leader)
        return chosen

    def _fail(self, number: int, why: str) -> None:
        self.race.fail(number, why)
        self.schedule.drop(number)
        self._judge_at = 0


def next_period_s(last_s: float, is_idle: bool, spent_s: float, trials: int) -> float:
    """How long to sleep after a look at all trials that took ``spent_s`` of CPU time; seconds."""
    wanted_s = min(2 * last_s, _LONGEST_IDLE_S) if is_idle else _PERIOD_S
    return max(wanted_s, min(spent_s / _SHARE, trials * _PERIOD_S, _LONGEST_S))


class OnlineTuner:
    """The thread; it lives while there are trials."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: list[Trial] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._cpu_s = 0.0

    def add(self, trial: Trial) -> None:
        with self._lock:
            if self._stopped.is_set():
                return  # the process ends: the first one serves
            self._trials.append(trial)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cudnn_autotune-online", daemon=True
                )
                self._thread.start()

    @property
    def undecided(self) -> int:
        """How many problems are still being decided."""
        with self._lock:
            return len(self._trials)

    @property
    def preparing(self) -> int:
        """How many of them have calls to come that do more than run the problem once."""
        with self._lock:
            return sum(not trial.prepared.is_over for trial in self._trials)

    @property
    def cpu_s(self) -> float:
        """CPU time of all steps so far, in seconds: what the callers' Python may have waited."""
        return self._cpu_s

    def stop(self) -> None:
        """Ends the thread for good. At exit it must be done before the interpreter goes."""
        self._stopped.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_EXIT_S)

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
            # What is over is let go before the next sleep.
            del trial, trials

    def _step(self, trial: Trial) -> bool:
        try:
            return trial.step()
        except Exception:
            # Whatever it is, the caller keeps being served; the reason must not be lost.
            why = traceback.format_exc()  # the error itself would keep its frames
            _log.error("online: gave up on a problem; its first plan stays\n%s", why)
        try:
            trial.settle()
        except Exception:
            _log.error("online: no more calls are timed\n%s", traceback.format_exc())
        return False


TUNER = OnlineTuner()
atexit.register(TUNER.stop)

__all__ = ["TUNER", "OnlineTuner", "Policy", "Prepared", "Trial", "next_period_s"]
