"""The table of a record of ddp_norms."""

from __future__ import annotations

from typing import Any

from common import numbers
from common.tables import NONE, Table, columns, number

from .ways import CHOSEN, baseline, parts


def step_ms(ranks: list[dict[str, Any]], way: str) -> list[float]:
    """The time of a way's steps in each turn, by the slowest rank."""
    return [max(turn) for turn in zip(*(rank["times_ms"][way] for rank in ranks), strict=True)]


def tables(data: dict[str, Any]) -> list[Table]:
    results, given = data["results"], data["arguments"]
    kind = ", SyncBatchNorm" if given.get("synchronised") else ""
    table = Table(
        f"{given['model']}{kind}, batch {given['batch']} a rank, {given['gpus']} ranks: "
        "a training step",
        columns("wrapper|way|ms|least, most|over PyTorch's norms|served norms|steps more"),
        note="Milliseconds a step of the slowest rank, median of the turns. "
        + " ".join(f"{failure}." for failure in results.get("failures", [])),
    )
    for launch in results.get("launches", []):
        ranks = launch["ranks"]
        bucket = f", buckets of {launch['bucket_mb']} MB" if launch["bucket_mb"] else ""
        for way in ranks[0]["times_ms"]:
            times = step_ms(ranks, way)
            base = baseline(way)
            ratio = None
            if base in ranks[0]["times_ms"]:
                pairs = zip(times, step_ms(ranks, base), strict=True)
                ratio = numbers.median([mine / other for mine, other in pairs])
            soaked = ranks[0]["soaked"].get(way)
            table.rows.append(
                (
                    launch["wrapper"] + bucket,
                    way,
                    f"{numbers.median(times):.2f}",
                    f"{min(times):.2f}, {max(times):.2f}",
                    number(ratio),
                    str(ranks[0]["served"]) if parts(way)[1] == CHOSEN else NONE,
                    str(soaked) if soaked else NONE,
                )
            )
        for way, why in ranks[0]["skipped"].items():
            table.note += f" Not run: {launch['wrapper']}{bucket}, {way} ({why})."
    return [table] if table.rows or results.get("failures") else []
