"""The settings of the steady-state final."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinalRules:
    """Which candidates run in the steady-state final, for how long, and what their times count."""

    reach: float = 1.1
    """Contenders whose time in the race is within this factor of the leader's take part."""
    most: int = 3
    """Most candidates in the first pass, the leader included. One more takes part where one of them
    beats the leader, and one more where what PyTorch would run is among them: nothing is chosen
    over it that is slower alone."""
    again_chunks: int = 4
    """Chunks of 40 ms of each run in a further pass."""
    rerun_margin: float = 0.02
    """Candidates within this of the best contender run again with it."""
    most_again: int = 2
    """Most contenders that run again, beside the race's leader."""
    passes: int = 4
    """Most further passes, each in the reverse order of the one before."""
    confident: float = 1.0
    """The final ends once the best leads by so many standard deviations of the noise."""
    precise: float = 0.006
    """It also ends once the noise is no more than this: what is left does not matter."""
    equal: float = 0.005
    """The race's leader keeps its place unless somebody beats it by more than this. Of others that
    are so near to one another the race decides, and the rules for ties where the race is a tie."""
    burst_weight: float = 0.1
    """What a percent in the race counts for beside one alone. A layer is seldom alone, so that the
    clock is not all its own; but one that is 5 % slower in turns and 2 % faster alone is to be
    taken."""
    is_patient: bool = False
    """Whether every run goes on until it is steady, even on a board that settles at once."""
