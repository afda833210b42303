"""``auto``, the default: a race, and a steady-state final only where it could change the choice.

After the race its leader runs alone for 0.16 s. If the clock holds, or if no candidate could beat
the leader at any clock, the race has decided. Else the contenders get sustained runs too, and their
times in the race are weighed against their steady times (``steady_final``). The leader gets no
sustained run if it does no more work per second than a candidate under which the same GPU lately
held its clock in the same dtype.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cudnn_autotune.engines.candidates import Candidates, Work
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.conclusion import race_selection
from cudnn_autotune.sampling.contenders import could_win
from cudnn_autotune.sampling.final_rules import FinalRules
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained_choice import (
    PROBE_CHUNKS,
    probe_leader,
    sustained_selection,
)
from cudnn_autotune.timers.timer import Timer

# Two measurements of the same rate of work differ by at most this factor.
_SLACK = 1.02
# A board warms up, its power limit changes, other GPUs of the machine begin to work. So an
# observation is valid for a minute. Another sustained run takes 0.16 s.
_LASTS_S = 60.0


class HeldClocks:
    """The rates of work at which a board was lately seen to hold its clock, in this process."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}

    def covers(self, work: Work, call_ms: float) -> bool:
        """Returns whether the board held its clock at this rate of work or a higher one."""
        flops, bytes_ = work.flops / call_ms, work.bytes / call_ms
        with self._lock:
            known = self._of_late(work)
            return any(flops <= _SLACK * f and bytes_ <= _SLACK * b for f, b, _ in known)

    def add(self, work: Work, call_ms: float) -> None:
        seen = (work.flops / call_ms, work.bytes / call_ms, self._now_s())
        with self._lock:
            self._seen[work.device, work.dtype] = [*self._of_late(work), seen]

    def _of_late(self, work: Work) -> list[tuple[float, float, float]]:
        known = self._seen.get((work.device, work.dtype), [])
        return [rate for rate in known if self._now_s() - rate[2] < _LASTS_S]


@dataclass(frozen=True)
class Auto:
    """The mode ``auto``. ``seed`` fixes the order of turns; with None it is random."""

    name: str = "auto"
    race_rules: RaceRules = field(default_factory=RaceRules)
    final_rules: FinalRules = field(default_factory=FinalRules)
    seed: int | None = None
    held: HeldClocks = field(default_factory=HeldClocks)

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        found = search(candidates, timer, limits, self.race_rules, random.Random(self.seed))
        if found is None:
            return None
        leader_ms = found.ms(found.leader) or math.inf
        work = candidates.work
        if not could_win(found, math.inf, None, self.final_rules):
            if not found.screening.out_of_budget:
                found.remarks.append("no contender within reach: no need to run the leader alone")
            return race_selection(found)
        if work is not None and self.held.covers(work, leader_ms):
            found.remarks.append("the board holds its clock at this rate of work")
            return race_selection(found)
        probe = probe_leader(found, PROBE_CHUNKS)
        if probe is None:
            return race_selection(found)
        if work is not None and not probe.is_throttled(timer.state().max_clock_mhz):
            self.held.add(work, probe.steady_ms)
        return sustained_selection(found, probe, self.final_rules)
