"""``online``: turns of candidates in the caller's own calls, without a long stall.

The heuristics' first plan serves the first call. Each of the next calls builds a candidate, and
enqueues a check of it on the call's own tensors. Engines that cuDNN compiles at run time are
compiled on background threads, and checked afterwards. Then one of every two calls, drawn at
random, runs the next candidate in turn, between two events for which it does not wait. The other
call runs the leader so far, and is not timed. This ends when one candidate is the fastest or no gap
matters any more. Only this mode measures under the model's own cache contents, power draw and other
load on the GPU. Until the end consecutive calls may differ in the last bits. Under deterministic
settings the first plan stays. During a stream's capture the leader so far runs.

The number of turns is bounded: the slower half of the candidates gives way after a number of turns,
and so on, until one is left. If the race is decided before the last engine is compiled, the fastest
so far serves all calls, and later engines race with it. If the process ends during a trial, the
next one continues it.

A budget bounds the total wait of the preparing calls: once it is spent no further candidate joins,
and the evidence says so. Turns are calls that the caller makes anyway.

``race`` judges the turns, ``tuner`` and ``preparation`` carry the mode out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.sampling.auto import Shortlist
from cudnn_autotune.sampling.strategy import Candidates


@dataclass(frozen=True)
class Online:
    """The mode ``online``. It has no ``select``: the caller's calls decide."""

    name: str = "online"
    decides_later = True

    def shortlist(self, candidates: Candidates, limit: int = 0) -> list[Candidate]:
        """Returns the candidates of the trial: the short list of ``auto``, since each further one
        costs turns of the caller. Mode FALLBACK's precompiled ones are left out: one call may stall
        the caller (docs/findings/fallback-mode.md).

        Args:
            limit: most of cuDNN's engine configs; 0: those of the short list. With a limit they are
                the first of mode A.
        """
        shortlist = Shortlist(candidates)
        beyond = [c for c in shortlist.beyond() if c != OWN_PATH or not candidates.aten_uses_cudnn]
        engines = list(candidates.of_mode("A"))[:limit]
        if not limit:
            engines = list(shortlist.of_mode("A"))
            engines += [c for c in shortlist.of_mode("FALLBACK") if c.is_compiled]
            engines += [c for c in beyond if c.engine is not None]
        others = [c for c in beyond if c.engine is None]
        return [*{c.text: c for c in engines}.values(), *others]
