"""The settings of the steady-state final."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinalRules:
    """Says which candidates run in the steady-state final, how long, and how their times are
    weighed."""

    reach: float = 1.1
    """Contenders have a time in the race within this factor of the leader's."""
    most: int = 3
    """Most candidates in the first pass, the leader included. One more runs if one of them beats
    the leader, and one more if PyTorch's candidate is among them, so that nothing is chosen over it
    that has a longer steady time."""
    again_chunks: int = 4
    """Chunks of 40 ms of each run in a further pass."""
    rerun_margin: float = 0.02
    """Candidates within this of the best contender run again with it."""
    most_again: int = 2
    """Most contenders that run again, beside the race's leader."""
    passes: int = 4
    """Most further passes, each in the reverse order of the one before."""
    confident: float = 1.0
    """The final ends once the best leads by this many standard deviations of the noise."""
    precise: float = 0.006
    """It also ends once the noise (relative) is no more than this, because a smaller gap does not
    matter."""
    equal: float = 0.005
    """The race's leader keeps its place unless a candidate beats it by more than this (relative).
    Among other candidates within this of each other the time in the race decides, and in a tie
    there the rules for ties."""
    burst_weight: float = 0.1
    """The weight of log(time in the race) beside log(steady time). Both count, because in a model a
    layer shares the clock with others. With this weight a candidate that is 5 % slower in the race
    but 2 % faster in sustained runs wins."""
