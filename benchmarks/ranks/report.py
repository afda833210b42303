"""The tables of a record of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import numbers
from common.tables import NONE, Table, columns, number

TARGETS = {2: 1.7, 4: 3.2}

Rows = dict[tuple[str, int], list[dict[str, Any]]]
"""(mode, GPUs) -> launches"""


def seconds(launch: dict[str, Any]) -> float:
    """Until the last rank had its table."""
    return max(rank["seconds"] for rank in launch["ranks"])


def agree(launch: dict[str, Any]) -> bool:
    """Whether all ranks got the same decisions, and serve the model by the same engines."""
    return all(len({rank[key] for rank in launch["ranks"]}) == 1 for key in ("decisions", "served"))


def is_tuned_once(launch: dict[str, Any]) -> bool:
    """Whether each problem was tuned by one rank, and none again by the model's own step."""
    ranks = launch["ranks"]
    tuned = sum(rank["tuned"] for rank in ranks)
    return tuned == ranks[0]["problems"] and not any(rank["tuned_again"] for rank in ranks)


def rows(results: dict[str, Any]) -> Rows:
    found: Rows = {}
    launches = results.get("launches", [])
    for launch in sorted(launches, key=lambda one: (one["mode"], one["gpus"])):
        found.setdefault((launch["mode"], launch["gpus"]), []).append(launch)
    return found


def speedup(found: Rows, mode: str, gpus: int) -> float | None:
    """Of the medians, over one GPU."""
    alone, mine = found.get((mode, 1)), found.get((mode, gpus))
    if not alone or not mine:
        return None
    return _median(alone) / _median(mine)


def _median(launches: Sequence[dict[str, Any]]) -> float:
    return numbers.median([seconds(launch) for launch in launches])


def tables(data: dict[str, Any]) -> list[Table]:
    results, arguments = data["results"], data["arguments"]
    what = f"{arguments['model']}, forward and backward, batch {arguments['batch']} a rank"
    table = Table(
        f"Tuning on several GPUs of one host: {what}",
        columns(
            "mode|GPUs|launches|seconds|over one GPU|target|problems|most, least a rank"
            "|ranks at work|all ranks agree|each tuned once"
        ),
        note="Seconds: of distributed.tune, until the last rank has its table; median (and range). "
        "Every launch has an empty store and nothing compiled. Ranks at work: the share of that "
        "time in which a rank was choosing, mean. All ranks agree: launches in which the decisions "
        "and the engines of a step of the model are the same on all ranks, by their hashes. "
        + " ".join(f"{failure}." for failure in results.get("failures", [])),
    )
    found = rows(results)
    for (mode, gpus), launches in found.items():
        times = [seconds(launch) for launch in launches]
        shares = [rank["tuned"] for launch in launches for rank in launch["ranks"]]
        work = [rank["busy_s"] / seconds(launch) for launch in launches for rank in launch["ranks"]]
        count = len(launches)
        spread = f" ({min(times):.1f} to {max(times):.1f})" if count > 1 else ""
        ratio = speedup(found, mode, gpus)
        table.rows.append(
            (
                mode,
                str(gpus),
                str(count),
                f"{numbers.median(times):.1f}{spread}",
                number(ratio, 2),
                number(TARGETS.get(gpus), 1),
                str(launches[0]["ranks"][0]["problems"]),
                f"{max(shares)}, {min(shares)}",
                f"{sum(work) / len(work) * 100:.0f} %",
                f"{sum(map(agree, launches))} of {count}" if gpus > 1 else NONE,
                f"{sum(map(is_tuned_once, launches))} of {count}",
            )
        )
    return [table] if table.rows or results.get("failures") else []
