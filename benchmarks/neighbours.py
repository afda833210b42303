#!/usr/bin/env python
"""What a config that won on a similar shape is worth on a new one: served at once, or raced first.

Of each layer some changed shapes are tuned into a store: twice and half the batch, a larger
picture, a wider layer. The layer itself is never among them. Then it is picked for, each time in a
process that has seen none of the layers:

at once   `neighbour` (the config of the nearest changed shape) and `heuristic`, which time nothing
race      to its end, and within budgets of wall time, with the store and without

At last one process times everything that was picked for a layer, what won on each of its changed
shapes, and the race's leaders: in interleaved rounds of short batches, cold and hot. Regret is a
pick's time over the fastest one's.

    python benchmarks/neighbours.py --json neighbours.json --plot neighbours.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

from common import arguments, ending
from common.cases import add_options, selected
from neighbour_picks.arms import RACE, Arm, arms
from neighbour_picks.changes import CHANGES, DEFAULT

FILL, JUDGE = "fill", "judge"
# Shares of the time: filling ends after the first; the last is kept for the judge.
FILL_SHARE, JUDGE_SHARE = 0.5, 0.2


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    add_options(p, "/float16")
    p.add_argument("--count", type=int, default=24, help="of those cases, taken at random")
    p.add_argument("--seed", type=int, default=0, help="of that")
    p.add_argument(
        "--changes", default=",".join(DEFAULT), help=f"%(default)s; of: {','.join(CHANGES)}"
    )
    p.add_argument("--sampling", choices=("race", "auto"), default="race", help="what races")
    p.add_argument("--budgets", default="50,100,200", help="ms of wall time; %(default)s")
    p.add_argument("--rounds", type=int, default=16, help="of the judge, for each cache state")
    p.add_argument("--time-limit", type=float, default=480, help="seconds for all")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def work(name: str) -> int:
    from common.scratch import find_compiled

    find_compiled(name)
    from common.workers import serve
    from neighbour_picks import measure

    return serve({FILL: measure.fill, JUDGE: measure.judge}.get(name, measure.pick))


def wanted(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Case id -> its description."""
    found = selected(options, options.seed)[: options.count]
    return {case.id: dataclasses.asdict(case) for case in found}


def checked(options: argparse.Namespace) -> tuple[list[str], list[Arm]]:
    """(changes, arms)"""
    changes = [change.strip() for change in options.changes.split(",")]
    if unknown := [change for change in changes if change not in CHANGES]:
        sys.exit(f"--changes: {unknown} unknown; allowed: {', '.join(CHANGES)}")
    try:
        budgets = [float(text) for text in options.budgets.split(",") if text.strip()]
    except ValueError:
        budgets = [0.0]
    if not all(budget > 0 for budget in budgets):
        sys.exit(f"--budgets must be comma-separated times above 0, got {options.budgets!r}")
    if options.count < 1:
        sys.exit(f"--count must be 1 or more, got {options.count}")
    if options.rounds < 2:
        sys.exit(f"--rounds must be 2 or more, got {options.rounds}")
    return list(dict.fromkeys(changes)), arms(dict.fromkeys(budgets))


def to_judge(case: dict[str, Any]) -> dict[str, list[str]]:
    """Texts of what was picked for a case, and of who led its race."""
    told = [*case["picks"].values(), *case["changes"].values()]
    picked = dict.fromkeys(t["text"] for t in told if "text" in t)
    leaders = case["picks"].get(RACE.name, {}).get("leaders", [])
    return {"picked": list(picked), "leaders": leaders}


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        return work(options.worker)
    changes, compared = checked(options)
    described = wanted(options)

    from common.record import Record
    from common.scratch import copy_compiled, scratch
    from common.telemetry import Telemetry
    from common.workers import WorkerError, started_ahead
    from neighbour_picks.report import plot, tables

    begin = time.monotonic()
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record("neighbours", options.json, device=options.device, arguments=arguments)
    cases: dict[str, dict[str, Any]] = record.results.setdefault("cases", {})
    failures: list[str] = record.results.setdefault("failures", [])
    by_name = {arm.name: arm for arm in compared}
    record.results["arms"] = list(by_name)
    names = [FILL, *by_name, JUDGE]
    common = {k: arguments[k] for k in ("device", "sampling", "rounds")} | {"changes": changes}
    ahead = 1 if options.device == "cpu" else len(names)
    with scratch() as folder, Telemetry(period_s=0.1) as telemetry:
        stores = {name: str(folder / f"store_{i}") for i, name in enumerate(described)}
        for index, worker in enumerate(started_ahead(__file__, names, ahead=ahead)):
            left = options.time_limit - (time.monotonic() - begin)
            if left < 5 or (worker.name != FILL and not cases):
                failures.append(f"time limit: not run: {', '.join(names[index:])}")
                break
            request: dict[str, Any] = dict(common)
            if worker.name == FILL:
                asked = {n: {"case": c, "store": stores[n]} for n, c in described.items()}
                request["seconds"] = left * FILL_SHARE
            elif worker.name == JUDGE:
                asked = {n: {"case": described[n], **to_judge(c)} for n, c in cases.items()}
                request["seconds"] = left - 5  # it ends by itself, and is not ended
            else:
                asked = {n: {"case": described[n], "store": stores[n]} for n in cases}
                for_judge = JUDGE_SHARE * options.time_limit
                request["seconds"] = max(1.0, (left - for_judge) / (len(names) - 1 - index))
                request |= dataclasses.asdict(by_name[worker.name])
            if worker.name != FILL:
                # All find compiled what filling has compiled, and not what another one has.
                copy_compiled(folder, FILL, worker.name)
            try:
                for entry in worker.run({**request, "cases": asked}, time_limit_s=left):
                    case = entry.pop("case")
                    if worker.name == FILL:
                        cases[case] = {"op": described[case]["op"], "picks": {}, **entry}
                    elif worker.name == JUDGE:
                        cases[case] |= entry
                    else:
                        cases[case]["picks"][worker.name] = entry
                    record.save(telemetry=telemetry.summary())
            except WorkerError as error:
                print(error, file=sys.stderr)
                failures.append(str(error))
            print(f"{worker.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    complete = len(cases) == len(described) and all(
        "oracle" in case and len(case["picks"]) == len(by_name) for case in cases.values()
    )
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
