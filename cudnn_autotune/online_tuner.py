"""Carries out ``online``: builds candidates and reads their turns on a thread of its own.

The callers' threads never wait for it: C++ gives turns and keeps their times
(csrc/online_trial.h), this thread decides (``sampling.online``).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cudnn_autotune._extension import _C
from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.sampling.online import OnlineRace
from cudnn_autotune.sampling.selection import Evidence, Selection, Timed

_log = logging.getLogger(__name__)

_PERIOD_S = 0.01
# Where nothing happens, as between two epochs.
_LONGEST_PERIOD_S = 0.16
# Plans that are compiled at run time, side by side: the caller's process has other work. So many
# are built in one step, some 0.3 s; at exit a step is waited for.
_AT_ONCE = 2
_EXIT_S = 10.0
# A problem that never comes back is not worth a search, and the first call is not disturbed.
_LEAST_CALLS = 2
# Turns are judged when there are this many more (relative): each look costs the callers some time
# of Python's lock, and some confidence.
_LOOK_AFTER = 0.1


class Policy(Protocol):
    """What a trial asks and tells; called on the tuner's thread, its device being current."""

    @property
    def is_wanted(self) -> bool:
        """False after ``forget()``."""

    @property
    def standing(self) -> str | None:
        """What another thread's trial of the same problem has chosen."""

    def others(self, search: _C.EngineSearch) -> Sequence[Candidate]:
        """Who takes part beside the first."""

    def open(self) -> _C.EngineSearch:
        """For building them."""

    def is_right(self, candidate: Candidate, plan: _C.Plan | None) -> bool:
        """Whether its output is; asked before it serves any call."""

    def tell(self, selection: Selection) -> bool:
        """The outcome; False where the chosen one is wrong, and the next best is wanted."""


@dataclass(eq=False)
class Trial:
    """One problem that is being decided in its callers' calls."""

    native: _C.OnlineTrial
    device: int
    first: Candidate
    policy: Policy
    race: OnlineRace = field(init=False)
    is_idle: bool = False
    """Whether the last step found nothing to do."""
    is_building: bool = True
    """Whether candidates are still to join."""

    def __post_init__(self) -> None:
        self.race = OnlineRace([self.first])
        self._start = time.perf_counter()
        self._search: _C.EngineSearch | None = None
        self._pending: list[Candidate] | None = None
        self._judge_at = 0

    def step(self) -> bool:
        """Does what there is to do; False once it is over."""
        if not self.native.is_in_use:
            return False
        if not self.policy.is_wanted:
            # Mostly nobody has it any more; it may also have been made while all was forgotten.
            self.native.decide(self.race.next_best() or 0)
            return False
        self.is_idle = self.native.calls < _LEAST_CALLS
        if self.is_idle:
            return True
        with torch.cuda.device(self.device):
            if self._adopt():
                return False
            self.is_building = self._build()
            chosen = self._read()
            if chosen is not None and not self.is_building:
                wall_ms = (time.perf_counter() - self._start) * 1e3
                if self.policy.tell(self.race.selection(chosen, wall_ms)):
                    self.native.decide(chosen)
                    return False
                self._fail(chosen, "wrong")
            is_alone = len(self.race.candidates) == 1
            if not self.is_building and (is_alone or not self.race.active):
                self.settle()
                return False
        return True

    def settle(self) -> None:
        """Ends what cannot be decided: the first stays, or who is left, or PyTorch's own path."""
        if 0 in self.race.active:
            self.native.decide(0)
            return
        left = self.race.next_best()
        if left is None:
            left = len(self.race.candidates)
            self._join([(ATEN, None)])
        candidate = self.race.candidates[left]
        evidence = Evidence(rule="the others fail", tied=(candidate.text,))
        self.native.decide(left)
        self.policy.tell(Selection((Timed(candidate, None, 0),), self.race.turns, evidence))

    def _adopt(self) -> bool:
        """Ends with what another thread has decided, if it is among those that run here."""
        text = self.policy.standing
        for number in self.race.active:
            if self.race.candidates[number].text == text:
                self.native.decide(number)
                return True
        return False

    def _build(self) -> bool:
        """Some more candidates, those that are built quickly first; False when all are there."""
        if self._pending is None:
            self._search = self.policy.open()
            others = [c for c in self.policy.others(self._search) if c.text != self.first.text]
            self._pending = sorted(others, key=lambda c: c.is_compiled)
        if not self._pending:
            self._search = None
            return False
        assert self._search is not None
        some, self._pending = self._pending[:_AT_ONCE], self._pending[_AT_ONCE:]
        engines = [c.text for c in some if c.engine is not None]
        built = zip(engines, self._search.build_many(engines, _AT_ONCE), strict=True)
        plans = {text: plan for text, (plan, _) in built if plan is not None}
        ready = [(c, plans.get(c.text)) for c in some if c.engine is None or c.text in plans]
        self._join([(c, plan) for c, plan in ready if self.policy.is_right(c, plan)])
        return True

    def _join(self, ways: Sequence[tuple[Candidate, _C.Plan | None]]) -> None:
        self.race.join([candidate for candidate, _ in ways])
        self.native.offer([(candidate.text, plan) for candidate, plan in ways])

    def _read(self) -> int | None:
        """What the turns since the last step say: the choice's number once there is one."""
        turns = self.race.turns
        self.race.add(self.native.take_samples())
        for number in self.native.failures():
            self.race.fail(number, "failed")
        self.is_idle = self.race.turns == turns and not self.is_building
        if self.race.turns < self._judge_at:
            return None
        self._judge_at = self.race.turns + max(
            len(self.race.active), int(_LOOK_AFTER * self.race.turns)
        )
        before = set(self.race.active)
        chosen = self.race.judge()
        for number in before - self.race.active:
            self.native.drop(number)
        leader = self.race.leader()
        if leader is not None:
            self.native.lead(leader)
        return chosen

    def _fail(self, number: int, why: str) -> None:
        self.race.fail(number, why)
        self.native.drop(number)
        self._judge_at = 0


class OnlineTuner:
    """The thread; it lives while there are trials."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: list[Trial] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

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
    def building(self) -> int:
        """How many of them still build candidates, and so cannot be decided yet."""
        with self._lock:
            return sum(trial.is_building for trial in self._trials)

    def stop(self) -> None:
        """Ends the thread for good. At exit it must be out of cuDNN before cuDNN goes."""
        self._stopped.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_EXIT_S)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # a lost device shows itself in the steps
            _C.allow_capture_elsewhere()
        period_s = _PERIOD_S
        while not self._stopped.wait(period_s):
            with self._lock:
                trials = list(self._trials)
                if not trials:
                    self._thread = None
                    return
            for trial in trials:
                if self._stopped.is_set():
                    return
                if not self._step(trial):
                    with self._lock:
                        self._trials.remove(trial)
            is_idle = all(trial.is_idle for trial in trials)
            period_s = min(2 * period_s, _LONGEST_PERIOD_S) if is_idle else _PERIOD_S
            # What is over is let go before the next sleep.
            del trial, trials

    def _step(self, trial: Trial) -> bool:
        try:
            return trial.step()
        except Exception:
            # Whatever it is, the caller keeps being served; the reason must not be lost.
            _log.exception("online: gave up on a problem; its first plan stays")
        try:
            trial.settle()
        except Exception:
            _log.exception("online: no more calls are timed")
        return False


TUNER = OnlineTuner()
atexit.register(TUNER.stop)

__all__ = ["TUNER", "OnlineTuner", "Policy", "Trial"]
