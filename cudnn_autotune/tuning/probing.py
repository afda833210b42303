"""Probes: calls that only show a model's problems. Their choices are not remembered, and no
``on_decision`` callback is called for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.tuning.choice import Choice

MODE = "heuristic"
# A choice is made at the first call under a policy. So each probe has a policy of its own, with a
# limit on the candidates below 0, which no other policy has.
_numbers = itertools.count(-1, -1)
_made: dict[int, list[Choice]] = {}


@dataclass
class Probed:
    """The requests of a probe's calls."""

    choices: list[Choice] = field(default_factory=list)
    """A choice for each problem and policy."""
    calls: dict[bytes, int] = field(default_factory=dict)
    """Number of calls of each problem, by its key."""

    def calls_of(self, problem: ConvProblem) -> int:
        """Returns the number of calls of a problem: 1 at least, once the probe is over."""
        return max(1, self.calls.get(_C.problem_key(problem.native()), 0))


@contextmanager
def probe() -> Iterator[Probed]:
    """Serves and records calls of this thread and their backward, within the context, by cuDNN's
    heuristics instead of their mode. Other threads are not affected."""
    number = next(_numbers)
    probed = Probed()
    _made[number] = probed.choices
    native = _C.Probe(number)
    try:
        with native:
            yield probed
    finally:
        probed.calls.update(native.calls())
        del _made[number]


def record(number: int, choice: Choice) -> None:
    """Appends the choice of a probe's call to its list, unless the probe is over."""
    made = _made.get(number)
    if made is not None:
        made.append(choice)
