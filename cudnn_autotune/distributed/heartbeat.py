"""A rank's heartbeat during a call: it shows the rank's life, and detects another one's death."""

from __future__ import annotations

import threading
import time

from cudnn_autotune.distributed.group import Group
from cudnn_autotune.distributed.mailbox import Mailbox
from cudnn_autotune.distributed.outcome import DistributedTuningError, Outcome

BEAT_S = 0.5
# A process without a beat for this many seconds is regarded as dead. The heartbeat is a thread that
# waits for the interpreter's lock, which a debugger or a start of CUDA may hold for seconds.
SILENT_S = 6.0
# Seconds of a rank's wait for an answer of the store. A rank that was stopped for longer must
# assume that the others have given up.
PATIENCE_S = 2 * SILENT_S
_JOIN_S = 5.0
OUTCOME = "outcome"


def beat_name(rank: int) -> str:
    return f"beat/{rank}"


class Heartbeat(threading.Thread):
    """A thread that beats, watches one other rank, and looks for the call's outcome.

    Each rank watches the next one, in a ring. So each rank queries the store a few times a second,
    for any number of ranks. As long as any rank lives, a living one watches some dead one.
    """

    def __init__(self, mailbox: Mailbox, group: Group, timeout_s: float) -> None:
        super().__init__(name="cudnn_autotune heartbeat", daemon=True)
        self._mailbox = mailbox
        self._group = group
        self._timeout_s = timeout_s
        self._step = ("", 0.0)
        self._beats = 0
        self._last_seen: str | None = None
        self._looked_at_s = self._silent_s = 0.0
        self._is_fresh = False
        self._stop_asked = threading.Event()
        self.ended = threading.Event()
        """Set once ``outcome`` is known."""
        self.outcome: Outcome | None = None

    def note(self, step: str) -> None:
        """Records the rank's next step, for which it has ``timeout_s``; empty if it waits."""
        self._step = (step, time.monotonic())

    def stop(self) -> None:
        """Ends the thread; no beat is written after this."""
        self._stop_asked.set()
        if self.is_alive():
            self.join(_JOIN_S)

    def propose(self, outcome: Outcome) -> Outcome:
        """Ends the call with ``outcome``, unless it has ended; returns the valid outcome."""
        try:
            stands = Outcome.from_text(self._mailbox.put_first(OUTCOME, outcome.to_text()))
        except DistributedTuningError as lost:
            # No other rank can be reached, nor can the store say whether all have agreed.
            stands = Outcome(lost.rank, lost.reason) if outcome.is_agreed else outcome
        return self._end(stands)

    def look(self) -> Outcome | None:
        """Returns the outcome, if there is one."""
        if self.outcome is None:
            text = self._mailbox.peek(OUTCOME)
            if text is not None:
                self._end(Outcome.from_text(text))
        return self.outcome

    def see_all_here(self) -> None:
        """Records that every rank has joined this call: no beat is from an earlier run any more."""
        self._is_fresh = True

    def run(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._stop_asked.is_set():
                self._beats += 1
                step, since_s = self._step
                self._mailbox.put(beat_name(self._group.rank), f"{self._beats} {step[:500]}")
                if self.look() is not None:
                    return
                now_s = time.monotonic()
                if now_s - last_s > PATIENCE_S:
                    # Others may have given up without an outcome in the store, for example if this
                    # rank hosts it.
                    self._blame_self(f"the process stood still for {now_s - last_s:.0f} s")
                elif step and now_s - since_s > self._timeout_s:
                    self._blame_self(f"timeout: no progress for {self._timeout_s:g} s at {step}")
                last_s = now_s
                self._watch((self._group.rank + 1) % self._group.size)
                self._stop_asked.wait(BEAT_S)
        except DistributedTuningError as lost:
            self._end(Outcome(lost.rank, lost.reason))
        except Exception as error:
            self._blame_self(f"{type(error).__name__}: {error}")

    def _blame_self(self, reason: str) -> None:
        self.propose(Outcome(self._group.global_rank, reason))

    def _watch(self, rank: int) -> None:
        """Ends the call if ``rank`` has not beaten for ``SILENT_S`` seconds."""
        seen = self._mailbox.peek(beat_name(rank))
        now_s = time.monotonic()
        # Only this process's clock is used, since two machines' clocks differ. A time without a
        # look (a stopped process, a slow store) counts in part only.
        looked_s = min(now_s - self._looked_at_s, 2 * BEAT_S)
        self._looked_at_s = now_s
        last, self._last_seen = self._last_seen, seen
        has_beaten = seen != last
        # A beat at this rank's first query may be from an earlier run.
        self._is_fresh = self._is_fresh or seen is None or (last is not None and has_beaten)
        if seen is None or has_beaten or not self._is_fresh:
            self._silent_s = 0.0
            return
        self._silent_s += looked_s
        if self._silent_s > SILENT_S:
            step = seen.partition(" ")[2]
            at = f", at {step}" if step else ""
            reason = f"the process died: no sign of life for {self._silent_s:.0f} s{at}"
            self.propose(Outcome(self._group.ranks[rank], reason))

    def _end(self, outcome: Outcome) -> Outcome:
        if self.outcome is None:
            self.outcome = outcome
        self.ended.set()
        return self.outcome
