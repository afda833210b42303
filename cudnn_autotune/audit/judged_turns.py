"""Turns of the candidates of one case, and their times: screening, a race, and rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import BURST_COLD, BURST_HOT, Truth
from cudnn_autotune.expert import Candidate, Turns, median_polish
from cudnn_autotune.sampling import Cache, Timer

Solo = Literal["never", "throttled", "always"]
SOLO: tuple[Solo, ...] = get_args(Solo)
"""When candidates get sustained runs, from the least measuring to the most."""

CACHES: tuple[Cache, ...] = ("cold", "hot")
CACHE_OF: dict[str, Cache] = {BURST_COLD: "cold", BURST_HOT: "hot"}


@dataclass(frozen=True)
class OracleSettings:
    """The settings of the oracle. Without sustained runs it takes about half a second of GPU time a
    case."""

    solo: Solo = "never"
    seed: int = 0


# For normal noise, the standard error of a median is 1.2533 times that of a mean, and 1.4826 times
# the median absolute deviation is the standard deviation.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
_ITERATIONS = 20  # median polish mostly converges in a few


def relative_error(ratios: npt.NDArray[np.float64]) -> float:
    """Returns the relative standard error of the median of ``ratios``, from their deviations."""
    centre = float(np.median(ratios))
    spread = float(np.median(np.abs(ratios - centre)))
    return _ERROR_OF_MEDIAN * spread / math.sqrt(len(ratios)) / centre


def of_rounds(times: dict[str, list[float]]) -> Truth:
    """Returns times and errors of complete rounds, by median polish of the logarithms."""
    texts = list(times)
    logs = np.log(np.array([times[text] for text in texts]))
    level = median_polish(logs.T, iterations=_ITERATIONS).log_time
    best = int(np.argmin(level))
    return Truth(
        {text: float(np.exp(value)) for text, value in zip(texts, level, strict=True)},
        {
            text: relative_error(np.exp(logs[i] - logs[best]))
            for i, text in enumerate(texts)
            if i != best
        },
    )


def of_blocks(blocks: dict[str, list[float]]) -> Truth:
    """Returns geometric means of two or more runs of each candidate, and their errors.

    The errors follow from how far the runs of one candidate lie apart, over all candidates: a few
    runs say little about their own noise.
    """
    logs = {text: np.log(times) for text, times in blocks.items()}
    freedom = sum(len(values) - 1 for values in logs.values())
    squares = sum(float(np.var(values)) * len(values) for values in logs.values())
    sigma = math.sqrt(squares / freedom)
    times = {text: math.exp(float(np.mean(values))) for text, values in logs.items()}
    best = min(times, key=times.__getitem__)
    return Truth(
        times,
        {
            text: sigma * math.sqrt(1 / len(logs[text]) + 1 / len(logs[best]))
            for text in times
            if text != best
        },
    )


# A first run may be disturbed in many ways, so only a candidate this much slower gets no second
# one.
_HOPELESS_FIRST_RUN = 10.0
_FIRST_RUN_MS = 100.0
# After two configs of an engine in a row that are this slow, its other configs do not run.
_HOPELESS = 5.0
# After one sample, with the clock perhaps still rising, a candidate this slow is left out.
_FAR = 1.6
_RACE_ROUNDS = 2
# The most candidates that reach the rounds, and the most that their time exceeds the best's.
_SURVIVORS = 10
_WITHIN = 1.10
_BATCH_MS = 0.5
ROUNDS = 16
"""Rounds with a cold cache, and as many with a hot one."""


class JudgedTurns(Turns):
    """The screening and the rounds of one case. Candidates whose texts are in ``picked`` are never
    left out for being slow."""

    def __init__(
        self, timer: Timer, settings: OracleSettings, picked: Collection[str] = ()
    ) -> None:
        super().__init__(timer, settings.seed)
        self.settings = settings
        self.picked = set(picked)
        self.clocks_mhz: list[float] = []
        """The SM clock of each short batch."""

    def screen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Runs candidates once or twice; returns those that run and are not far behind."""
        best = math.inf
        slow_in_a_row: Counter[str] = Counter()
        for candidate in candidates:
            engine = candidate.engine_name
            if slow_in_a_row[engine] > 1 and candidate.text not in self.picked:
                continue
            sample = self.once(candidate)
            if sample and sample.time_ms <= _HOPELESS_FIRST_RUN * best + _FIRST_RUN_MS:
                sample = self.once(candidate)
                best = min(best, sample.time_ms if sample else math.inf)
            if sample is None:
                continue
            self.rough_ms[candidate.text] = sample.time_ms
            is_slow = sample.time_ms > _HOPELESS * best and candidate.engine is not None
            slow_in_a_row[engine] = slow_in_a_row[engine] + 1 if is_slow else 0
        return [
            c
            for c in candidates
            if c.text in self.rough_ms
            and (c.text in self.picked or self.rough_ms[c.text] <= _FAR * best)
        ]

    def race(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates that are worth long rounds, fastest first, and those that were
        picked."""
        times = self.interleaved(candidates, _RACE_ROUNDS)
        level = {
            text: float(np.exp(np.mean(np.log([*row, *times["hot"][text]]))))
            for text, row in times["cold"].items()
        }
        if not level:
            return []
        self.rough_ms.update(level)
        limit = _WITHIN * min(level.values())
        order = sorted((c for c in candidates if c.text in level), key=lambda c: level[c.text])
        kept = [c for c in order if level[c.text] <= limit][:_SURVIVORS]
        return kept + [c for c in order if c.text in self.picked and c not in kept]

    def interleaved(
        self, candidates: Sequence[Candidate], rounds: int
    ) -> dict[Cache, dict[str, list[float]]]:
        """Runs rounds with a cold and with a hot cache. Returns milliseconds of a call by cache
        state, candidate and round, without the candidates that failed in any round."""
        times: dict[Cache, dict[str, list[float]]] = {cache: {} for cache in CACHES}
        for _ in range(rounds):
            order = self.next_order(candidates)
            for cache in CACHES:
                for text, sample in self.round(order, cache, _BATCH_MS).items():
                    times[cache].setdefault(text, []).append(sample.time_ms)
                    if sample.clock_mhz is not None:
                        self.clocks_mhz.append(sample.clock_mhz)
        return {
            cache: {text: row for text, row in rows.items() if text not in self.failed}
            for cache, rows in times.items()
        }
