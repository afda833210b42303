"""Choices that are made only to see which problems there are: not remembered, and nobody hears of
them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_autotune.core.extension import _C
from cudnn_autotune.tuning.choice_log import Choice

MODE = "heuristic"
# Choices are made at the first call under a policy. So each probe gets a policy of its own: in the
# place of a limit on the candidates a number below 0, as no limit is.
_numbers = itertools.count(-1, -1)
_made: dict[int, list[Choice]] = {}


@contextmanager
def probe() -> Iterator[list[Choice]]:
    """Calls within, and their backward, are served by cuDNN's heuristics, whatever mode they name,
    and their choices go into the list. Those of other threads are as ever."""
    number = next(_numbers)
    made = _made[number] = []
    try:
        with _C.Probe(number):
            yield made
    finally:
        del _made[number]


def is_probe(benchmark_limit: int) -> bool:
    """Whether a call with this limit is one of a probe."""
    return benchmark_limit < 0


def take(choice: Choice) -> None:
    """The choice that such a call has led to."""
    made = _made.get(choice.benchmark_limit)
    if made is not None:  # else it comes late: nobody asks any more
        made.append(choice)
