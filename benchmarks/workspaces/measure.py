"""The worker of workspace_place.py: a layer in one direction, its engines on near and far pages."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common import numbers
from common.leading import REACH, raced
from common.sources import Source, failure, fast_listed, source_of

PAGE_BYTES = 4096
_BLOCK_PAGES = 128
_BATCH_MS = 1.5
_MOST_CALLS = 200
# Replayed as a graph below: the host could not enqueue them in time.
_GRAPH_BELOW_MS = 0.05

# A page's number -> ms a call and MHz.
OnPage = Callable[[int], tuple[float, float | None]]


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ``pages``, then one ``engine`` an engine, then ``finished``; ``failed`` for a step or
    a candidate that failed."""
    try:
        yield from engines(source_of(request), request)
    except Exception as error:  # a layer that fails is recorded, and the next one has its turn
        yield {"part": "failed", "step": "engines", "error": failure(error)}


def engines(source: Source, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    timer, candidates = source.open()
    try:
        turns, survivors = raced(timer, fast_listed(candidates))
        place = Simulated(timer) if request["device"] == "cpu" else Memory(timer, source)
        far = place.far()
        near = [page for page in range(len(place.cycles)) if page not in far]
        yield {"part": "pages", "cycles": place.cycles, "far": far}
        if not far:
            raise RuntimeError("the pages are not of two kinds")
        halves = {"near": near[: request["pages"]], "far": far[: request["pages"]]}
        best_ms = min(turns.rough_ms[c.text] for c in survivors)
        chosen = [
            c
            for c in survivors
            if 0 < place.needs(c) <= PAGE_BYTES and turns.rough_ms[c.text] <= REACH * best_ms
        ][: request["engines"]]
        for candidate in chosen:
            on_page = place.engine(candidate, turns.rough_ms[candidate.text])
            times, clocks = in_turns(on_page, halves, request["rounds"])
            yield {
                "part": "engine",
                "text": candidate.text,
                "workspace_bytes": place.needs(candidate),
                "rough_ms": numbers.significant(turns.rough_ms[candidate.text], 4),
                "best_rough_ms": numbers.significant(best_ms, 4),
                "times_ms": times,
                "clock_mhz": numbers.significant(statistics.median(clocks), 4) if clocks else None,
            }
        yield {"part": "finished"}
    finally:
        source.close(timer)


def in_turns(
    on_page: OnPage, halves: dict[str, Sequence[int]], rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Half -> a page's median time, ms at the mean clock of all, page by page; and the clocks."""
    order = random.Random(0)
    found: dict[int, list[tuple[float, float | None]]] = {}
    for _ in range(rounds):
        pages = [page for half in halves.values() for page in half]
        order.shuffle(pages)
        for page in pages:
            found.setdefault(page, []).append(on_page(page))
    clocks = [clock for rows in found.values() for _, clock in rows if clock is not None]
    mean = statistics.fmean(clocks) if clocks else 1.0
    times = {
        name: [
            numbers.significant(
                statistics.median(ms * ((clock or mean) / mean) for ms, clock in found[page]), 5
            )
            for page in half
        ]
        for name, half in halves.items()
    }
    return times, clocks


class Memory:
    """Pages of a GPU that is here."""

    def __init__(self, timer: Any, source: Any) -> None:
        import torch

        from cudnn_autotune import _C
        from cudnn_autotune.timers.measuring import operands

        self._timer = timer
        self._problem = source.problem.native()
        self._operands = operands(source.problem, "cuda:0")
        block = torch.zeros((_BLOCK_PAGES + 1) * PAGE_BYTES, dtype=torch.uint8, device="cuda:0")
        self._pages = block[-block.data_ptr() % PAGE_BYTES :][: _BLOCK_PAGES * PAGE_BYTES]
        self.cycles: list[int] = _C.page_cycles(self._pages)

    def far(self) -> list[int]:
        from cudnn_autotune import _C

        found: list[int] = _C.far_pages(self.cycles)
        return found

    def needs(self, candidate: Any) -> int:
        plan = self._timer.plans.get(candidate.text)
        return 0 if plan is None else int(plan.workspace_bytes)

    def engine(self, candidate: Any, rough_ms: float) -> OnPage:
        from cudnn_autotune import _C

        native = _C.PlanTimer(self._problem, [self._operands], 0, workspace_pages=False)
        number = native.add(candidate.text, self._timer.plans[candidate.text])
        calls = max(2, min(_MOST_CALLS, round(_BATCH_MS / rough_ms)))
        batch = (number, calls, False, rough_ms < _GRAPH_BELOW_MS)

        def on_page(page: int) -> tuple[float, float | None]:
            native.set_workspace(self._pages[page * PAGE_BYTES :][:PAGE_BYTES])
            time_ms, clock_mhz, _, error = native.run([batch, batch], 2)[-1]
            if error:
                raise RuntimeError(f"{candidate.text}: {error}")
            return time_ms, clock_mhz or None

        return on_page


class Simulated:
    """For dry runs: invented pages, none of which is better."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self.cycles = [1000 + 900 * (page % 2) for page in range(_BLOCK_PAGES)]

    def far(self) -> list[int]:
        return [page for page, cycles in enumerate(self.cycles) if cycles > 1500]

    def needs(self, candidate: Any) -> int:
        return PAGE_BYTES

    def engine(self, candidate: Any, rough_ms: float) -> OnPage:
        from cudnn_autotune.timers.timer import Batch

        calls = max(2, min(_MOST_CALLS, round(_BATCH_MS / rough_ms)))

        def on_page(page: int) -> tuple[float, float | None]:
            (sample,) = self._timer.run([Batch(candidate, calls, "hot")])
            return sample.time_ms, sample.clock_mhz

        return on_page
