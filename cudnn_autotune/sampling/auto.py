"""``auto``, the default: a race, and a steady-state final only where it could change the choice.

After the race its leader runs alone for a moment. If it holds its clock, or if no contender could
beat it at any clock, the race has decided. Else those that could run alone too, and what they lose
in turns is weighed against what they gain (``steady_final``). A leader that does no more work a
second than one that was seen to hold its clock before, on the same GPU in the same dtype, is not
even probed.
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
from cudnn_autotune.sampling.conclusion import selection
from cudnn_autotune.sampling.contenders import could_win
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.steady_final import FinalRules
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained import PROBE_CHUNKS, decided, probed
from cudnn_autotune.sampling.sustained_run import is_throttled
from cudnn_autotune.timers.timer import Timer

# Two measurements of the same work differ by so much.
_SLACK = 1.02
# A board warms up, its power limit changes, its neighbours begin to work: a minute later it is
# probed again, which takes 0.1 s.
_LASTS_S = 60.0


class HeldClocks:
    """Rates of work at which a board was seen to hold its clock of late; of this process.

    Args:
        now_s: a clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}

    def covers(self, work: Work, call_ms: float) -> bool:
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
    """``seed``: of the order of turns; None: another one each time."""

    name: str = "auto"
    race_rules: RaceRules = field(default_factory=RaceRules)
    final_rules: FinalRules = field(default_factory=FinalRules)
    seed: int | None = None
    held: HeldClocks = field(default_factory=HeldClocks)

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        rng = random.Random(self.seed)
        found = search(candidates, timer, limits, self.race_rules, rng)
        if found is None:
            return None
        leader_ms = found.ms(found.leader) or math.inf
        work = candidates.work
        if not could_win(found, math.inf, None, self.final_rules):
            if not found.screening.out_of_budget:
                found.remarks.append("no contender within reach: no need to run the leader alone")
            return selection(found, timer, self.race_rules)
        if work is not None and self.held.covers(work, leader_ms):
            found.remarks.append("the board holds its clock at this rate of work")
            return selection(found, timer, self.race_rules)
        probe = probed(found, timer, PROBE_CHUNKS, self.race_rules, rng)
        if probe is None:
            return selection(found, timer, self.race_rules)
        if work is not None and not is_throttled(probe, timer.state().max_clock_mhz):
            self.held.add(work, probe.steady_ms)
        return decided(found, probe, timer, self.race_rules, self.final_rules, rng)
