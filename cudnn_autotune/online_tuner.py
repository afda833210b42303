"""Carries out ``online``: builds candidates and reads their turns on a thread of its own.

The callers' threads never wait for it: C++ gives turns and keeps their times
(csrc/online_trial.h), this thread decides (``sampling.online``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cudnn_autotune._extension import _C
from cudnn_autotune.engines import Candidate
from cudnn_autotune.sampling.online import OnlineRace
from cudnn_autotune.sampling.selection import Selection

_log = logging.getLogger(__name__)

_PERIOD_S = 0.01
# Plans that are compiled at run time, side by side: the caller's process has other work.
_THREADS = 2


@dataclass
class Trial:
    """One problem that is being decided in its callers' calls."""

    native: _C.OnlineTrial
    device: int
    first: Candidate
    search: Callable[[], _C.EngineSearch]
    others: Callable[[_C.EngineSearch], list[Candidate]]
    decided: Callable[[Selection, Mapping[str, _C.Plan]], bool]
    """Told the outcome, and the plans that took part; False where the chosen one is wrong, and the
    next best is wanted."""
    race: OnlineRace = field(init=False)
    plans: dict[str, _C.Plan] = field(default_factory=dict)
    is_prepared: bool = False

    def __post_init__(self) -> None:
        self.race = OnlineRace([self.first])

    def step(self) -> bool:
        """Does what there is to do; False once it is over."""
        if not self.native.is_in_use:
            return False
        if not self.is_prepared:
            self.is_prepared = True
            self._prepare()
            return True
        self.race.add(self.native.take_samples())
        for number in self.native.failures():
            self.race.fail(number, "failed")
        before = set(self.race.active)
        chosen = self.race.judge()
        for number in before - self.race.active:
            self.native.drop(number)
        if chosen is not None:
            selection = self.race.selection(chosen)
            if not self.decided(selection, self.plans):
                self.race.fail(chosen, "wrong")
                self.native.drop(chosen)
                return bool(self.race.active)
            self.native.decide(chosen)
            return False
        leader = self.race.leader()
        if leader is not None:
            self.native.lead(leader)
        return bool(self.race.active)

    def _prepare(self) -> None:
        with torch.cuda.device(self.device):
            search = self.search()
            others = [c for c in self.others(search) if c.text != self.first.text]
            plain = [c for c in others if not c.is_compiled]
            for some in (plain, [c for c in others if c.is_compiled]):
                engines = [c for c in some if c.engine is not None]
                built = search.build_many([c.text for c in engines], _THREADS)
                for candidate, (plan, _) in zip(engines, built, strict=True):
                    if plan is not None:
                        self.plans[candidate.text] = plan
                ready = [c for c in some if c.text in self.plans or c.engine is None]
                self.race.join(ready)
                self.native.offer([(c.text, self.plans.get(c.text)) for c in ready])


class OnlineTuner:
    """The thread; it lives while there are trials."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: list[Trial] = []
        self._thread: threading.Thread | None = None

    def add(self, trial: Trial) -> None:
        with self._lock:
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

    def _run(self) -> None:
        while True:
            with self._lock:
                trials = list(self._trials)
                if not trials:
                    self._thread = None
                    return
            for trial in trials:
                if not self._step(trial):
                    with self._lock:
                        self._trials.remove(trial)
            time.sleep(_PERIOD_S)

    def _step(self, trial: Trial) -> bool:
        try:
            return trial.step()
        except Exception:
            # The caller keeps being served by who leads; the reason must not be lost.
            _log.exception("online: gave up on a problem; %s stays", trial.first.text)
            return False


TUNER = OnlineTuner()

__all__ = ["TUNER", "OnlineTuner", "Trial"]
