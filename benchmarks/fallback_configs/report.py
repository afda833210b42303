"""What a record of fallback_mode.py says: tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.cases import layer_text
from common.tables import Table, dry_run_note, number, percent

FASTER, NEAR = 0.99, 1.05
TICKS = (0.5, 0.7, 1, 2, 5, 10, 100, 1000)
# What computes: the order of the rows, and colours.
KINDS = ("tensor cores, compiled at run time", "tensor cores", "no tensor cores")


def kind(config: dict[str, Any]) -> str:
    if not config["tensor_core"]:
        return KINDS[2]
    return KINDS[0] if config["compiled"] else KINDS[1]


def over_best(config: dict[str, Any]) -> float | None:
    """Its time over that of the best of the others; None where it was not timed."""
    found: float | None = config.get("ratio", config.get("rough"))
    return found


def configs(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(case, config) of all that mode FALLBACK lists."""
    measured = results.get("measured", [])
    return [(found["case"], config) for found in measured for config in found["configs"]]


def by_engine(results: dict[str, Any]) -> dict[tuple[str, int], list[tuple[str, dict[str, Any]]]]:
    """(kind, engine) -> its (case, config); kinds as listed, engines by number."""
    found: dict[tuple[str, int], list[tuple[str, dict[str, Any]]]] = {}
    for case, config in configs(results):
        found.setdefault((kind(config), config["engine"]), []).append((case, config))
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])))


def tables(data: dict[str, Any]) -> list[Table]:
    results = data["results"]
    found = [_engines(results), _faster(results)]
    found[0].note += dry_run_note(data)
    return [table for table in found if table.rows]


def _engines(results: dict[str, Any]) -> Table:
    measured = results.get("measured", [])
    table = Table(
        "What heuristic mode FALLBACK lists, over the best that others list precompiled",
        (
            "engine",
            "directions",
            "configs",
            "timed",
            "dropped",
            "least",
            "median",
            "within 5 %",
            "> 1 % faster",
            "build ms",
        ),
        note=f"{len(measured)} layers. The others: all of mode A, and the first four of mode B. "
        "Time over that of the best of them, of what was timed: in rounds that take turns where "
        "single calls came within 1.5 times of it, mean of cold and hot cache. Dropped: a call "
        "fails, or takes more than 20 ms. Engines without tensor cores were run on layers of at "
        "most 5 GFLOP. " + "; ".join(results.get("failures", [])),
    )
    for (kind_, engine), entries in by_engine(results).items():
        ratios = [r for _, config in entries if (r := over_best(config)) is not None]
        builds = [config["build_ms"] for _, config in entries if "build_ms" in config]
        table.rows.append(
            (
                f"eng{engine}, {kind_}",
                ", ".join(sorted({case.split("/")[1] for case, _ in entries})),
                str(len(entries)),
                str(len(ratios)),
                str(sum(config["outcome"] == "dropped" for _, config in entries)),
                number(min(ratios, default=None)),
                number(numbers.median(ratios) if ratios else None, 2),
                str(sum(r <= NEAR for r in ratios)),
                str(sum(r < FASTER for r in ratios)),
                number(numbers.median(builds) if builds else None, 0),
            )
        )
    return table


def _faster(results: dict[str, Any]) -> Table:
    table = Table(
        "Where a config of mode FALLBACK is faster than that by more than 1 %",
        ("layer", "config", "over the best", "that one"),
    )
    for found in results.get("measured", []):
        known = [c for c in found["configs"] if c.get("ratio") is not None]
        best = min(known, key=lambda c: float(c["ratio"]), default=None)
        if best is not None and best["ratio"] < FASTER:
            row = (layer_text(found["case"]), best["text"], percent(best["ratio"]), found["best"])
            table.rows.append(row)
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """Of each engine all its times over the best of the others."""
    from common import plotting

    engines = by_engine(data["results"])
    fig, axes = plotting.figure(1, 1, width=8, height=1.2 + 0.25 * max(4, len(engines)))
    axis = axes[0][0]
    for place, ((kind_, _), entries) in enumerate(engines.items()):
        ratios = [r for _, config in entries if (r := over_best(config)) is not None]
        color = f"C{KINDS.index(kind_)}"
        axis.plot(ratios, [place] * len(ratios), "o", color=color, alpha=0.5, markersize=4)
    for kind_ in dict.fromkeys(kind_ for kind_, _ in engines):
        axis.plot([], [], "o", color=f"C{KINDS.index(kind_)}", label=kind_)
    axis.axvline(1, color="gray", linewidth=0.8)
    axis.set_xscale("log")
    least, most = axis.get_xlim()
    ticks = [tick for tick in TICKS if least <= tick <= most]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(engines)), [f"eng{engine}" for _, engine in engines])
    axis.set_ylim(len(engines) - 0.5, -0.5)
    axis.set_xlabel("time over the best of mode A and the first of B")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    plotting.save(fig, path, data["environment"])
