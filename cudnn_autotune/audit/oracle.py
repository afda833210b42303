"""The long measurement by which modes are judged; it uses only a ``timers.timer.Timer``.

1. Screening: every candidate runs once or twice. Those far behind are left out, and so are other
   configs of an engine whose configs are far slower (some take 300 ms where the best takes 0.7).
2. A short race of the others leaves the survivors, within 10 % of the best. A picked candidate
   always survives.
3. Rounds: all survivors take turns in short batches, in random order, the next round mirrored
   (drift that is linear cancels), with cold operands and with hot ones.
4. On request, sustained runs: the leading ones run alone until the clock is steady, in one order
   and then in its mirror image. By default they do so only if a probe of the leader shows a clock
   below the highest: elsewhere a steady call takes what a short one does.

Times are paired: the logarithm of a time is a candidate's effect plus a round's effect plus
noise (median polish), and errors are those of a candidate's distance from the fastest.

It shares no elimination and no sustained run with ``sampling``: the oracle must not inherit the
bugs of the modes that it judges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Ratio, Truth
from cudnn_autotune.audit.summary import truth_of
from cudnn_autotune.expert import OWN_PATH, Candidate, Turns, at_limit_ms, median_polish, named
from cudnn_autotune.sampling import Batch, Cache, GpuState, Sample, Timer

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


# Relative distance of a power reading from the limit beyond which it is not used.
_FAR_FROM_LIMIT = 0.25
STRETCH = 5
"""The number of batches of each cache state between two checks of whether the time is steady."""


class RunCriterion:
    """Stops a run of batches of ``calls`` calls once the time is steady in every cache state, after
    ``least_ms`` of GPU time at the least and ``most_ms`` at the most. A time is steady if it
    changes by less than ``tolerance`` (relative)."""

    def __init__(self, calls: int, least_ms: float, most_ms: float, tolerance: float) -> None:
        self._calls = calls
        self._least_ms = least_ms
        self._most_ms = most_ms
        self._tolerance = tolerance
        self._times: dict[Cache, list[float]] = {}
        self.spent_ms = 0.0
        self.is_finished = False

    def add_measurement(self, measurement: Sequence[tuple[Cache, Sample]]) -> None:
        """Takes further batches into account, each with its cache state."""
        for cache, sample in measurement:
            self._times.setdefault(cache, []).append(sample.time_ms)
            self.spent_ms += sample.time_ms * self._calls
        is_long = self.spent_ms >= self._least_ms
        is_steady = is_long and all(map(self._is_steady, self._times.values()))
        self.is_finished = is_steady or self.spent_ms >= self._most_ms

    def _is_steady(self, times: Sequence[float]) -> bool:
        """Returns whether the last third of a run agrees with the third before it."""
        third = len(times) // 3
        if third < STRETCH:
            return False
        last, before = times[-third:], times[-2 * third : -third]
        return bool(abs(np.median(last) / np.median(before) - 1) < self._tolerance)


@dataclass(frozen=True)
class SteadyTime:
    """A candidate's steady time by one sustained run."""

    time_ms: float
    """The geometric mean over the cache states, brought to the power limit if it was read."""
    clock_mhz: float | None


def steady_time(ran: Sequence[tuple[Cache, Sample]], board: GpuState) -> SteadyTime:
    """Returns the time of one sustained run, from the batches at the candidate's own clock.

    A power controller lets one run draw somewhat more than another. Where the board's power was
    read in the last two thirds of the run, the time is that at the power limit.

    Args:
        ran: its batches in their order, some of each cache state; none of them failed.
        board: a reading of the board with its power limit and its highest clock.
    """
    caches = sorted({cache for cache, _ in ran})
    steady = ran[-max(2 * len(caches), len(ran) // 3) :]
    level_ms = {
        cache: float(np.median([s.time_ms for c, s in steady if c == cache])) for cache in caches
    }
    relative = at_limit_ms(
        [s.time_ms / level_ms[cache] for cache, s in ran],
        [s.clock_mhz for _, s in ran],
        [s.power_w for _, s in ran],
        board,
        since=len(ran) // 3,
        within=_FAR_FROM_LIMIT,
    )
    log = float(np.mean(np.log(list(level_ms.values()))))
    if relative:
        log += float(np.mean(np.log(relative)))
    clocks = [s.clock_mhz for _, s in steady if s.clock_mhz is not None]
    return SteadyTime(math.exp(log), float(np.median(clocks)) if clocks else None)


_SUSTAINED_BATCH_MS = 10.0
_PROBE_MS = 150.0
"""Milliseconds for which the leader runs alone to find out whether the board throttles."""
_CLOCK_DROP = 0.015
"""Share by which the probe's clock is lower than the highest if the board throttles."""
_LEAST_MS = 300.0
"""Least milliseconds of a sustained run; it goes on to three times that until it is steady."""
_MOST_SUSTAINED = 4
"""The most candidates with sustained runs, not counting picked ones."""
_STEADY = 0.015
"""Relative tolerance of a steady time. The power controller's oscillation makes an H200's runs
differ by 2 %, however long they are, so there are more runs rather than longer ones."""
_NEAR = 1.04
"""Largest time, relative to the fastest after the first pass, of a candidate that is measured
again."""


class SustainedRuns:
    """Sustained runs of candidates that have taken turns before."""

    def __init__(self, turns: JudgedTurns) -> None:
        self.turns = turns
        self.remarks: list[str] = []

    def truth(self, candidates: Sequence[Candidate], burst: Truth) -> Truth | None:
        """Returns the steady times of candidates that could be the fastest, and of those that were
        picked. Returns None if no sustained run succeeds, or, unless the settings say ``always``,
        if the clock holds in a sustained run of the fastest.
        """
        settings = self.turns.settings
        by_text = {c.text: c for c in candidates if c.text in burst.times_ms}
        probe = self._run(by_text[burst.best], _PROBE_MS, _PROBE_MS)
        if probe is None:
            return None
        if settings.solo == "throttled" and not self._throttled(probe, burst):
            self.remarks.append("the clock holds under load: sustained times not measured")
            return None
        # A candidate is at most a few percent faster in a sustained run than in turns. So one whose
        # time in turns is 10 % longer than the leader's steady time cannot win.
        limit = 1.1 * max(probe.time_ms, burst.times_ms[burst.best])
        order = sorted(burst.times_ms, key=burst.times_ms.__getitem__)
        wanted = [text for text in order if burst.times_ms[text] <= limit]
        wanted = wanted[:_MOST_SUSTAINED]
        wanted += [text for text in order if text in self.turns.picked and text not in wanted]
        return self._both_ways([by_text[text] for text in wanted])

    def _both_ways(self, candidates: Sequence[Candidate]) -> Truth | None:
        """Runs every candidate twice, the second time in mirrored order, and measures steady times.

        Candidates near the fastest, and those that were picked, then run twice again.
        """
        blocks: dict[str, list[float]] = {c.text: [] for c in candidates}
        self._pass(candidates, blocks)
        means = {text: math.prod(some) ** 0.5 for text, some in blocks.items() if len(some) == 2}
        if not means:
            return None
        limit = _NEAR * min(means.values())
        again = [
            c
            for c in candidates
            if c.text in means and (means[c.text] <= limit or c.text in self.turns.picked)
        ]
        if len(again) > 1:
            self._pass(again, blocks)
        complete = {c.text: blocks[c.text] for c in candidates if len(blocks[c.text]) > 1}
        return of_blocks(complete)

    def _pass(self, candidates: Sequence[Candidate], blocks: dict[str, list[float]]) -> None:
        for candidate in (*candidates, *reversed(candidates)):
            block = self._run(candidate, _LEAST_MS, 3 * _LEAST_MS)
            if block is not None:
                blocks[candidate.text].append(block.time_ms)

    def _throttled(self, probe: SteadyTime, burst: Truth) -> bool:
        known = [*self.turns.clocks_mhz]
        highest = self.turns.timer.state().max_clock_mhz
        if highest is not None:
            known.append(highest)
        if known and probe.clock_mhz is not None:
            return probe.clock_mhz < (1 - _CLOCK_DROP) * max(known)
        return probe.time_ms > (1 + _CLOCK_DROP) * burst.times_ms[burst.best]

    def _run(self, candidate: Candidate, least_ms: float, most_ms: float) -> SteadyTime | None:
        """Runs a candidate until its time is steady; returns None if it fails."""
        calls = self.turns.calls(candidate, _SUSTAINED_BATCH_MS)
        criterion = RunCriterion(calls, least_ms, most_ms, _STEADY)
        ran: list[tuple[Cache, Sample]] = []
        round_ms = len(CACHES) * calls * self.turns.rough_ms[candidate.text]
        while not criterion.is_finished:
            # One call of the timer runs all batches, because a power reading counts only if it lies
            # within one.
            stretch = max(STRETCH, math.ceil((least_ms - criterion.spent_ms) / round_ms))
            batches = [Batch(candidate, calls, cache) for cache in CACHES] * stretch
            samples = self.turns.timer.run(batches)
            for sample in samples:
                if not math.isfinite(sample.time_ms):
                    self.turns.failed[candidate.text] = sample.error or "fails to run"
                    return None
            new = [(batch.cache, s) for batch, s in zip(batches, samples, strict=True)]
            ran += new
            criterion.add_measurement(new)
            round_ms = criterion.spent_ms * len(CACHES) / len(ran)
        return steady_time(ran, self.turns.timer.state())


def measure(
    timer: Timer,
    candidates: Sequence[Candidate],
    picked: Collection[str] = (),
    settings: OracleSettings | None = None,
) -> Oracle:
    """Judges a case, given all its candidates, PyTorch's own path included. Those whose texts are
    in ``picked`` are measured to the end, however slow.

    If no candidate runs, the ``Oracle`` has an ``error``. What the timer raises (a lost device) is
    not caught.
    """
    turns = JudgedTurns(timer, settings or OracleSettings(), picked)
    runs = SustainedRuns(turns)
    runnable = timer.runnable(candidates)
    for text in turns.picked - {c.text for c in runnable}:
        turns.failed[text] = "does not build, or its workspace cannot be had"
    survivors = turns.race(turns.screen(runnable))
    truths = burst_truths(turns.interleaved(survivors, ROUNDS))
    burst = truth_of(Oracle(truths), BURST)
    if burst is not None and turns.settings.solo != "never":
        sustained = runs.truth(survivors, burst)
        if sustained is not None:
            truths[SUSTAINED] = sustained
    return Oracle(
        truths,
        candidates=len(candidates),
        failed=turns.failed,
        solo=turns.settings.solo,
        remarks=tuple(runs.remarks),
        error="" if truths else "no candidate runs",
    )


def burst_truths(times: Mapping[Cache, dict[str, list[float]]]) -> dict[str, Truth]:
    """Returns the truths from rounds, by name; empty if no candidate ran in all rounds."""
    if not all(times.values()):
        return {}
    return {name: of_rounds(times[cache]) for name, cache in CACHE_OF.items()}


def against_pytorch(
    timer: Timer, reference: Candidate, settings: OracleSettings
) -> dict[str, Ratio]:
    """Measures the time of PyTorch's call over that of ``reference``, which is runnable.

    Returns ratios by truth; the sustained one only if ``settings.solo`` wants it. Raises
    RuntimeError if one of the two does not run."""
    if reference.text == OWN_PATH.text:
        # PyTorch's own path is chosen only if it does not use cuDNN. Then PyTorch's cuDNN flags
        # have no effect, and both calls are the same.
        truths = [BURST_COLD, BURST_HOT, *([] if settings.solo == "never" else [SUSTAINED])]
        return dict.fromkeys(truths, Ratio(1.0, 1.0, 1.0))
    pair = [OWN_PATH, reference]
    turns = JudgedTurns(timer, settings, [c.text for c in pair])
    times = turns.interleaved(turns.screen(pair), ROUNDS)
    if any(len(row) < 2 for row in times.values()):
        raise RuntimeError(f"PyTorch's call or {reference.text} does not run")
    found = {}
    for name, cache in CACHE_OF.items():
        ratios = np.array(times[cache][OWN_PATH.text]) / np.array(times[cache][reference.text])
        low, median, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
        found[name] = Ratio(median, low, high, relative_error(ratios))
    burst = truth_of(Oracle(burst_truths(times)), BURST)
    if burst is not None and settings.solo != "never":
        sustained = SustainedRuns(turns).truth(pair, burst)
        if sustained is not None and len(sustained.times_ms) == len(pair):
            ratio = sustained.times_ms[OWN_PATH.text] / sustained.times_ms[reference.text]
            error = max(sustained.errors.values())
            found[SUSTAINED] = Ratio(ratio, ratio * (1 - error), ratio * (1 + error), error)
    return found


def candidate_of(text: str, known: list[Candidate]) -> Candidate:
    """Returns the candidate of that text: one of ``known``, or a config that no heuristic lists.
    Raises ValueError if it is neither."""
    listed = next((candidate for candidate in known if candidate.text == text), None)
    return listed or named(text, len(known))
