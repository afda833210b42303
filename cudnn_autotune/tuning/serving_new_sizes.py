"""The source of choices (``tuning.miss``) for new sizes of a layer: its other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement
from cudnn_autotune.sampling.auto import few
from cudnn_autotune.tuning import new_sizes, remembering, settings
from cudnn_autotune.tuning.choice import Choice, untimed
from cudnn_autotune.tuning.new_sizes import Nearby
from cudnn_autotune.tuning.serving import Served, own_path, serve
from cudnn_autotune.tuning.source import Miss, begin_trial

# The most stored decisions in the search for alike sizes. Other layers' may be nearer.
_MOST_STORED = 8


def find(miss: Miss) -> Served | None:
    """Serves a new size without timing: by the first candidate that builds quickly and is allowed
    and right, else by PyTorch's own path. None if the size needs a search."""
    stored = partial(remembering.nearest, miss.problem, miss.device, _MOST_STORED)
    nearby = new_sizes.fast_nearby(miss.problem, miss.device, stored)
    if nearby is None:
        return None
    served = next(filter(None, _by_candidates(miss, nearby)), None)
    if served is None:
        choice = _unmeasured(miss, OWN_PATH, "PyTorch's own path, until the size is measured")
        served = Served(choice, own_path(miss.problem, miss.device))
    if settings.get_new_shapes() != "online" or nearby.is_known:
        return served
    begin = partial(
        begin_trial,
        shortlist=few,
        nearby=nearby.contenders,
        budget_ms=miss.limits.budget_ms,
        first_step=new_sizes.calls_before_trial(miss.problem, miss.device),
    )
    return replace(served, begin_trial=begin)


def _by_candidates(miss: Miss, nearby: Nearby) -> Iterator[Served | None]:
    for candidate in new_sizes.ready(nearby, miss.problem, miss.device):
        yield serve(_unmeasured(miss, candidate, "chosen for a similar problem"), miss.tensors)


def _unmeasured(miss: Miss, candidate: Candidate, rule: str) -> Choice:
    entry = Measurement(replace(candidate, heuristic_mode=""), None, 0)
    evidence = Evidence(rule=rule, tied=(candidate.text,))
    return Choice(untimed(miss.problem, miss.policy, entry, evidence), miss.device, "neighbour")
