"""What a record of kernel_cfgs.py says: tables and the plot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from common.tables import Table, dry_run_note

from .greedy import Layer, greedy, mean, relative
from .measure import LISTED

NONE = "–"
FASTER = 0.99
MOST = 8  # kernels of a portfolio
SHOWN = (1, 2, 4)  # sizes that have a row, beside the last
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20)


def by_engine(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """``eng78, dgrad`` -> its measurements."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in results.get("measured", []):
        found.setdefault(f"eng{entry['engine']}, {entry['op']}", []).append(entry)
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    results = data["results"]
    found = [_portfolios(results), _layers(results)]
    found[0].note += dry_run_note(data)
    return [table for table in found if table.rows]


def _portfolios(results: dict[str, Any]) -> Table:
    engines = by_engine(results)
    builds = [e["build_s"] / e["built"] for entries in engines.values() for e in entries]
    table = Table(
        "Kernels of the engines that are compiled at run time, against cuDNN's listed configs",
        ("engine", "compiled: KERNEL_CFG", "how many", "mean time", "layers > 1 % faster"),
        note="Mean time: the geometric mean over the layers of the fastest of the compiled kernels "
        "and the fastest precompiled config that heuristics A and B list, over the latter. The "
        "search takes, one by one, the kernel that lowers it the most. Times: short batches that "
        "take turns, mean of cold and hot cache."
        + (f" Building: {sum(builds) / len(builds) * 1e3:.0f} ms a kernel." if builds else ""),
    )
    for engine, entries in engines.items():
        layers = [relative(entry) for entry in entries]
        every = {name for layer in layers for name in layer if name != LISTED}
        table.rows.append((engine, "the one that cuDNN lists", *_row(layers, [LISTED])))
        found = [name for name, _ in greedy(layers, most=MOST)]
        for count in sorted({n for n in SHOWN if n <= len(found)} | ({len(found)} - {0})):
            taken = found[:count]
            table.rows.append((engine, ", ".join(taken), *_row(layers, taken)))
        shipped = [str(value) for value in entries[0]["shipped"]]
        if shipped:
            text = f"the package's: {', '.join(shipped)}"
            table.rows.append((engine, text, *_row(layers, shipped)))
        table.rows.append((engine, "all that it has", *_row(layers, every)))
    return table


def _row(layers: Sequence[Layer], chosen: Collection[str]) -> tuple[str, str, str]:
    best = [min((layer[n] for n in chosen if n in layer), default=1.0) for layer in layers]
    faster = sum(ratio < FASTER for ratio in best)
    return str(len(chosen)), f"{mean(layers, chosen):.4f}", f"{faster} of {len(layers)}"


def best_kernel(layer: Layer) -> str | None:
    return min((n for n in layer if n != LISTED), key=layer.__getitem__, default=None)


def _layers(results: dict[str, Any]) -> Table:
    engines = by_engine(results)
    table = Table(
        "The fastest kernel on each layer: its KERNEL_CFG, its time over the best listed config's",
        ("layer", *engines),
        note="; ".join(results.get("failures", [])),
    )
    names = dict.fromkeys(entry["layer"] for entry in results.get("measured", []))
    for name in names:
        cells = []
        for entries in engines.values():
            layer = next((relative(e) for e in entries if e["layer"] == name), {})
            best = best_kernel(layer)
            cells.append(f"{best}: {layer[best]:.3f}" if best is not None else NONE)
        table.rows.append((name, *cells))
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """Left: the mean by how many kernels are compiled; right: the best kernel on each layer."""
    from common import plotting

    engines = by_engine(data["results"])
    fig, axes = plotting.figure(1, 2, width=10, height=3.6)
    left, right = axes[0]
    for place, (engine, entries) in enumerate(engines.items()):
        layers = [relative(entry) for entry in entries]
        means = [1.0, *(value for _, value in greedy(layers, most=MOST))]
        left.plot(range(len(means)), means, "o-", color=f"C{place}", label=engine)
        best = [layer[name] for layer in layers if (name := best_kernel(layer)) is not None]
        right.plot(best, [place] * len(best), "o", color=f"C{place}", alpha=0.6)
    left.set_xlabel("kernels compiled")
    left.set_ylabel("time over the best listed config's")
    left.set_title("a portfolio of kernels, mean over the layers", fontsize=10)
    left.legend(fontsize=8)
    right.axvline(1, color="gray", linewidth=0.8)
    right.set_xscale("log")
    least, most = right.get_xlim()
    ticks = [tick for tick in TICKS if least <= tick <= most]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.set_xticks([], minor=True)
    right.set_yticks(range(len(engines)), list(engines))
    right.set_ylim(len(engines) - 0.5, -0.5)
    right.set_xlabel("time over the best listed config's")
    right.set_title("each layer's fastest kernel", fontsize=10)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    plotting.save(fig, path, data["environment"])
