"""A rank's heartbeat during a call: shows that it lives, and sees who no longer does."""

from __future__ import annotations

import json
import threading
import time

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.distributed.ending import Ending
from cudnn_autotune.distributed.errors import DistributedTuningError
from cudnn_autotune.distributed.mailbox import Mailbox

BEAT_S = 0.5
# A process of which nothing was heard for so long is gone. The heartbeat is a thread, and waits for
# the interpreter's lock; what holds that for seconds (a debugger, a start of CUDA) must not look
# like death.
SILENT_S = 6.0
# For so long a rank waits for an answer of the store. Who himself stood still for longer must take
# it that others have given up.
PATIENCE_S = 2 * SILENT_S
_JOIN_S = 5.0
ENDING = "ending"


def beat_name(rank: int) -> str:
    return f"beat/{rank}"


class Pulse(threading.Thread):
    """Beats, watches one other rank, and looks for the call's ending.

    Each rank watches the next one, in a ring: however many there are, the store is asked a few
    times a second by each, and as long as one lives and one does not, some living rank has a dead
    one to watch. ``rank`` is a place in the group, ``ranks`` are the global ones.
    """

    def __init__(
        self, mailbox: Mailbox, rank: int, ranks: tuple[int, ...], timeout_s: float
    ) -> None:
        super().__init__(name="cudnn_autotune heartbeat", daemon=True)
        self._mailbox = mailbox
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._doing = ""
        self._step = 0
        self._beat = 0
        self._last: tuple[int, int] | None = None
        self._last_look_s = self._silent_s = self._stuck_s = 0.0
        self._is_fresh = False
        self._stop_asked = threading.Event()
        self.ended = threading.Event()
        """Set once ``ending`` is known."""
        self.ending: Ending | None = None

    def note(self, doing: str) -> None:
        """What the rank does from now on, for at most ``timeout_s``; empty: it waits for others."""
        # In this order, since the thread may read in between: an old text with a new number is
        # merely told of in the wrong words.
        self._step += 1
        self._doing = doing

    def stop(self) -> None:
        """No beat is written after this."""
        self._stop_asked.set()
        if self.is_alive():
            self.join(_JOIN_S)

    def propose(self, ending: Ending) -> Ending:
        """Ends the call so, unless it has ended already; returns how it has."""
        try:
            stands = Ending.from_text(self._mailbox.put_first(ENDING, ending.to_text()))
        except DistributedTuningError as lost:
            # Nobody can be told, and nobody can be asked whether all have agreed.
            stands = Ending(lost.rank, lost.reason) if ending.is_agreed else ending
        self._end(stands)
        assert self.ending is not None
        return self.ending

    def look(self) -> Ending | None:
        """The ending, if there is one."""
        if self.ending is None:
            text = self._mailbox.peek(ENDING)
            if text is not None:
                self._end(Ending.from_text(text))
        return self.ending

    def see_all_here(self) -> None:
        """From now on every rank is known to have come in this call."""
        self._is_fresh = True

    def run(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._stop_asked.is_set():
                self._mailbox.put(beat_name(self._rank), self._told())
                if self.look() is not None:
                    return
                now_s = time.monotonic()
                if now_s - last_s > PATIENCE_S:
                    # Others may have given up without a word: this rank hosts the store, say.
                    reason = f"the process stood still for {now_s - last_s:.0f} s"
                    self.propose(Ending(self._ranks[self._rank], reason))
                    return
                last_s = now_s
                self._watch((self._rank + 1) % len(self._ranks))
                self._stop_asked.wait(BEAT_S)
        except DistributedTuningError as lost:
            self._end(Ending(lost.rank, lost.reason))
        except Exception as error:
            self.propose(Ending(self._ranks[self._rank], f"{type(error).__name__}: {error}"))

    def _told(self) -> str:
        self._beat += 1
        return json.dumps({"beat": self._beat, "step": self._step, "doing": self._doing[:500]})

    def _watch(self, rank: int) -> None:
        text = self._mailbox.peek(beat_name(rank))
        now_s = time.monotonic()
        # Only this process's clock counts, since those of two machines differ; and of the time in
        # which it did not look itself (it was stopped, or the store was slow) only a part.
        looked_s = min(now_s - self._last_look_s, 2 * BEAT_S)
        self._last_look_s = now_s
        if text is None:  # it has not come yet, or has left
            self._last = None
            self._is_fresh = True
            return
        fields = Node(json.loads(text), "heartbeat").fields("beat", "step", "doing")
        beat, step = fields["beat"].integer(), fields["step"].integer()
        doing = fields["doing"].text()
        last, self._last = self._last, (beat, step)
        has_beaten = last is None or beat != last[0]
        has_stepped = last is None or step != last[1] or not doing
        # A beat that was there before this rank looked may be what an earlier run has left.
        self._is_fresh = self._is_fresh or (last is not None and has_beaten)
        silent_s, stuck_s = self._silent_s + looked_s, self._stuck_s + looked_s
        self._silent_s = silent_s if self._is_fresh and not has_beaten else 0.0
        self._stuck_s = stuck_s if self._is_fresh and not has_stepped else 0.0
        if self._silent_s > SILENT_S:
            at = f", at {doing}" if doing else ""
            reason = f"the process died: no sign of life for {self._silent_s:.0f} s{at}"
        elif self._stuck_s > self._timeout_s:
            reason = f"timeout: no progress for {self._timeout_s:g} s at {doing}"
        else:
            return
        self.propose(Ending(self._ranks[rank], reason))

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
        self.ended.set()
