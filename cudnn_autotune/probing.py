"""Choices that are made only to see which problems there are: not remembered, and nobody hears of
them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_autotune.choice_log import Choice
from cudnn_autotune.settings import use_sampling

MODE = "heuristic"
# Choices are made at the first call under a policy. So each probe gets a policy of its own: a limit
# on the candidates to time, of which this mode times none. Threads of autograd make some of them.
_limits = itertools.count(2**31 - 1, -1)
_made: dict[int, list[Choice]] = {}


@contextmanager
def probe() -> Iterator[list[Choice]]:
    """Calls within are served by cuDNN's heuristics, and their choices go into the list."""
    limit = next(_limits)
    made = _made[limit] = []
    try:
        with use_sampling(MODE, benchmark_limit=limit):
            yield made
    finally:
        del _made[limit]


def is_probe(benchmark_limit: int) -> bool:
    """Whether a call with this limit is one of a probe: it is answered by the heuristics, whatever
    mode it names."""
    return benchmark_limit in _made


def take(choice: Choice) -> None:
    """The choice that such a call has led to."""
    made = _made.get(choice.benchmark_limit)
    # Who names a mode of his own in the call itself tunes by it, and will again.
    if made is not None and choice.sampling == MODE:
        made.append(choice)
