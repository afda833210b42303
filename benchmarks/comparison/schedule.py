"""Which worker gets which cases, and how long: a whole run fits its time limit, and a run that
does not still leaves cases that are complete in every column."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.convolution import OUR_MODES, Case
from common.workers import Worker, WorkerError, started_ahead

from .analysis import is_complete, picked_texts, processes, sampled, survivors

# What a process costs before its first case (context, handle, libraries), and rough costs per
# case, in seconds: they share the time limit out before anything is known.
START_S = 5.0
SECONDS = {
    "scout": 0.5,
    "oracle": 0.7,
    "heuristic": 0.03,
    "sample_once": 0.3,
    "median_of_three": 0.5,
    "till_stable": 0.4,
    "pytorch_off": 0.5,
    "pytorch_on_10": 0.6,
    "pytorch_on_0": 0.8,
}
# Launches of every candidate that a mode makes, the warm-up included.
LAUNCHES = {"heuristic": 0, "sample_once": 2, "median_of_three": 4, "till_stable": 4}
LAUNCHES |= {"pytorch_off": 0, "pytorch_on_10": 2, "pytorch_on_0": 2}


def predicted_s(mode: str, reference: str, scouted: dict[str, Any]) -> float:
    """GPU time that a mode will spend on sampling a case, from the scout's rough times."""
    sweep_ms = float(scouted.get("sweep_ms") or 0.0)
    if mode in OUR_MODES:
        return LAUNCHES[mode] * sweep_ms / 1e3
    own_ms = float(scouted.get("first_ten_ms") or 0.0) if mode == "pytorch_on_10" else sweep_ms
    return (LAUNCHES[mode] * own_ms + LAUNCHES[reference] * sweep_ms) / 1e3


class Session:
    """One invocation: works through scout, sampling processes and oracle, in that order.

    A process gets the cases that all before it have done, so that the time limit cuts off cases
    and not columns.
    """

    def __init__(
        self,
        script: str,
        cases: list[Case],
        results: dict[str, Any],
        arguments: dict[str, Any],
        save: Callable[[], None],
    ) -> None:
        self.script = script
        self.results = results
        self.arguments = arguments
        self.save = save
        self.names = processes(arguments)
        self.begin = time.monotonic()
        self.failures = 0
        self.by_id = {case.id: case for case in cases}
        known = results.setdefault("cases", {})
        known.update({case.id: case.described() for case in cases if case.id not in known})
        self.todo = [c for c in self.by_id if not self.complete(c)]

    def complete(self, case: str) -> bool:
        return is_complete(self.results, case, self.names)

    def left_s(self) -> float:
        return float(self.arguments["time_limit"]) - (time.monotonic() - self.begin)

    def run(self) -> None:
        if not self.todo:
            return
        eligible = list(self.todo)
        # A run that continues starts no process that has nothing left to do.
        steps = [s for s in ("scout", *self.names) if not all(self.has(s, c) for c in eligible)]
        steps.append("oracle")
        for index, worker in enumerate(started_ahead(self.script, steps)):
            needs = [
                START_S + SECONDS[step.split("#")[0]] * len(eligible) for step in steps[index:]
            ]
            share = self.left_s() * needs[0] / sum(needs)
            if share > 1.0:
                self.step(worker, eligible, share)
            eligible = [c for c in eligible if self.has(worker.name, c)]
            if not eligible:
                break

    def has(self, name: str, case: str) -> bool:
        if name in ("scout", "oracle"):
            return case in self.results.get(name, {})
        return sampled(self.results, name, case) is not None

    def step(self, worker: Worker, eligible: list[str], share_s: float) -> None:
        """Sends a worker its cases and keeps what comes back."""
        mode = worker.name.split("#")[0]
        if mode in ("scout", "oracle"):
            task, into = mode, self.results.setdefault(mode, {})
        else:
            task = "pick" if mode in OUR_MODES else "pytorch"
            into = self.results.setdefault("sampled", {}).setdefault(worker.name, {})
        entries = [entry for c in eligible if (entry := self.entry(worker.name, mode, c, into))]
        if not entries:
            return
        request = {
            "task": task,
            "mode": mode,
            "device": self.arguments["device"],
            "options": self.arguments,
            "cases": entries,
            "seconds": share_s,
        }
        begin = time.monotonic()
        done = 0
        try:
            # A case in flight at the end of the share may finish; a hang may not.
            for message in worker.run(request, time_limit_s=share_s + 60):
                into[message["case"]] = message["result"]
                done += 1
                if done % 8 == 0:
                    self.save()
        except WorkerError as error:
            self.failures += 1
            print(error, file=sys.stderr)
            self.results.setdefault("failures", []).append(str(error))
        print(
            f"{worker.name}: {done} of {len(entries)} cases in {time.monotonic() - begin:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        self.save()

    def entry(self, name: str, mode: str, case: str, into: dict[str, Any]) -> dict[str, Any] | None:
        """What a worker is sent for a case; None where there is nothing to do."""
        scouted = self.results.get("scout", {}).get(case, {})
        described = self.by_id[case].described()
        if name == "oracle":
            texts = survivors(
                scouted,
                within=self.arguments["survivors_within"],
                at_most=self.arguments["survivors"],
            )
            texts += [t for t in picked_texts(self.results, case) if t not in texts]
            if not texts or self.complete(case):
                return None
            return {"case": described, "texts": texts}
        if case in into:
            return None
        if name != "scout":
            if "error" in scouted:
                into[case] = {"skipped": scouted["error"]}
                return None
            cost = predicted_s(mode, self.arguments["reference"], scouted)
            if cost > self.arguments["case_limit"]:
                into[case] = {"skipped": f"sampling would take about {cost:.1f} s of GPU time"}
                return None
        return {"case": described}


def load_layers(path: Path, options: Any) -> list[Case]:
    """The cases that --cases, --share and --device leave of a layer list.

    Raises:
        SystemExit: --cases that match nothing.
    """
    from common.convolution import load_cases

    cases = load_cases(path)
    if options.cases:
        wanted = options.cases.split(",")
        cases = [case for case in cases if any(text in case.id for text in wanted)]
        if not cases:
            sys.exit(f"--cases: no case of {path.name} contains any of {wanted}")
    part, parts = options.share
    cases = cases[part - 1 :: parts]
    return [case.shrunk() for case in cases] if options.device == "cpu" else cases
