"""From a record of compare_sampling.py to regrets: how far from the best is what a mode picked?

The oracle's rounds time a case's picks and survivors side by side. The regret of a pick is the
median over the rounds of its time divided by that of the best config (the one with the lowest
median) in the same round. PyTorch does not say which engine config it picked: its worker timed
its call and the pick of our reference mode in turns, and

    regret(PyTorch) = ratio(PyTorch / reference, its process) * regret(reference pick, oracle).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from common import numbers
from common.convolution import OUR_MODES, TORCH_MODES


def processes(arguments: dict[str, Any]) -> list[str]:
    """The sampling processes of a run: "mode#run" in the order of execution."""
    modes = arguments["modes"].split(",")
    names = []
    for run in range(arguments["runs"]):
        ours = [f"{m}#{run + 1}" for m in modes if m in OUR_MODES]
        names += ours if run % 2 == 0 else ours[::-1]
    return names + [f"{m}#1" for m in modes if m in TORCH_MODES]


def sampled(results: dict[str, Any], name: str, case: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = results.get("sampled", {}).get(name, {}).get(case)
    return found


def picked_texts(results: dict[str, Any], case: str) -> list[str]:
    """Every engine config that a process picked or used as its reference for the case."""
    texts = set()
    for by_case in results.get("sampled", {}).values():
        entry = by_case.get(case, {})
        texts.add(entry.get("text") or entry.get("reference_text"))
    return sorted(t for t in texts if t and t != "aten")


def survivors(scouted: dict[str, Any], *, within: float, at_most: int) -> list[str]:
    """The configs whose rough time is within a factor of the best, fastest first."""
    rough: dict[str, float] = scouted.get("rough_ms", {})
    if not rough:
        return []
    best = min(rough.values())
    close = [text for text, time in rough.items() if time <= within * best]
    return sorted(close, key=lambda text: rough[text])[:at_most]


def is_complete(results: dict[str, Any], case: str, names: list[str]) -> bool:
    """Whether every process and the oracle dealt with the case."""
    if "error" in results.get("scout", {}).get(case, {}):
        return True  # nothing can be compared; the error stands in the record
    if any(sampled(results, name, case) is None for name in names):
        return False
    judged = results.get("oracle", {}).get(case)
    if judged is None:
        return False
    known = {**judged.get("times_ms", {}), **judged.get("failed", {})}
    return "error" in judged or all(text in known for text in picked_texts(results, case))


def best_text(times: dict[str, list[float]]) -> str:
    return min(times, key=lambda text: numbers.median(times[text]))


def regret(times: dict[str, list[float]], text: str) -> float | None:
    best = times[best_text(times)]
    if text not in times:
        return None
    return numbers.median([a / b for a, b in zip(times[text], best, strict=True)])


def noise(times: dict[str, list[float]]) -> float:
    """Relative standard error of a regret near 1: that of the runner-up's paired ratio."""
    ordered = sorted(times, key=lambda text: numbers.median(times[text]))
    if len(ordered) < 2:
        return 0.0
    first, second = times[ordered[0]], times[ordered[1]]
    return numbers.relative_standard_error([a / b for a, b in zip(second, first, strict=True)])


@dataclasses.dataclass
class ModeSummary:
    """One mode over all shared cases and all its runs."""

    mode: str
    cases: int
    regrets: list[float]
    tuning_ms: list[float]
    total_tuning_s: float
    agree: tuple[int, int] | None
    agreeing_in_time: tuple[int, int] | None

    def off_by(self, share: float) -> int:
        return sum(1 for r in self.regrets if r > 1 + share)


def case_regret(results: dict[str, Any], name: str, case: str) -> float | None:
    entry = sampled(results, name, case)
    times = results.get("oracle", {}).get(case, {}).get("times_ms", {})
    if entry is None or len(times) == 0:
        return None
    if "ratio" in entry:
        reference = regret(times, entry["reference_text"])
        return None if reference is None else reference * float(entry["ratio"])
    return regret(times, entry["text"]) if "text" in entry else None


def tuning_of(entry: dict[str, Any]) -> float | None:
    """The time that a first call spends on choosing: what the user waits for."""
    value = entry.get("tuning_wall_ms")
    return None if value is None else float(value)


def shared_cases(results: dict[str, Any], names: list[str]) -> list[str]:
    """The complete cases that every process could do: modes are compared on the same cases."""
    return [
        case
        for case in results.get("cases", {})
        if is_complete(results, case, names)
        and all(case_regret(results, name, case) is not None for name in names)
    ]


def left_out(results: dict[str, Any], names: list[str]) -> dict[str, str]:
    """The complete cases that are not compared, and why."""
    reasons = {}
    shared = set(shared_cases(results, names))
    for case in results.get("cases", {}):
        if case in shared or not is_complete(results, case, names):
            continue
        entries = [results.get("scout", {}).get(case, {}), results.get("oracle", {}).get(case, {})]
        entries += [sampled(results, name, case) or {} for name in names]
        told = [e[key] for e in entries for key in ("error", "skipped") if key in e]
        aten = any(e.get("text") == "aten" or e.get("reference_text") == "aten" for e in entries)
        reasons[case] = told[0] if told else "ATen runs it" if aten else "a pick failed to run"
    return reasons


def summarize(results: dict[str, Any], mode: str, names: list[str]) -> ModeSummary:
    mine = [name for name in names if name.split("#")[0] == mode]
    cases = shared_cases(results, names)
    regrets: list[float] = []
    tuning: list[float] = []
    per_run: dict[str, float] = dict.fromkeys(mine, 0.0)
    agree = same_time = comparable = 0
    for case in cases:
        entries = [sampled(results, name, case) or {} for name in mine]
        values = [v for name in mine if (v := case_regret(results, name, case)) is not None]
        regrets += values
        for name, entry in zip(mine, entries, strict=True):
            spent = tuning_of(entry)
            if spent is not None:
                tuning.append(spent)
                per_run[name] += spent / 1e3
        if mode in OUR_MODES and len(mine) > 1:
            comparable += 1
            agree += len({e["text"] for e in entries}) == 1
            same_time += max(values) / min(values) < 1.01
    return ModeSummary(
        mode,
        len(cases),
        regrets,
        tuning,
        numbers.median(list(per_run.values())) if per_run else math.nan,
        (agree, comparable) if comparable else None,
        (same_time, comparable) if comparable else None,
    )
