"""The tables and the plot of a record of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import NONE, Table, dry_run_note, number

from .cases import PYTORCH, STEPS, WAYS

Run = dict[str, Any]
Key = tuple[str, str]
"""A way, and PyTorch's mode: none for ways of ours, to which it makes no difference."""
_SLOWER = 1.01
# Quartiles are shown if one is further than this from the median (relative).
_WIDE = 0.01
_TICKS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 3, 4)
_LONGEST, _NAME = 4, 48  # kernels of a way that a table shows, and characters of their names
_CASE = ("model", "step, layout, batch")


class Row:
    """A case, with the processes that measured it. The main process is the first with the most
    ways. Times of other processes are scaled to it by the ratio to a common way, one of ours if
    possible."""

    def __init__(self, key: tuple[str, str, str, int], runs: list[Run]) -> None:
        model, self.step, self.layout, self.batch = key
        self.case = (model, f"{STEPS[self.step]}, {self.layout}, {self.batch}")
        order = list(PYTORCH)
        runs = sorted(runs, key=lambda run: order.index(run["pytorch"]))
        runs.sort(key=lambda run: len(run.get("times_ms", {})), reverse=True)
        self.ways: dict[str, dict[str, Any]] = {}
        """What is known of each way beside its times, from the first process that has it."""
        self.peak_bytes: dict[str, int] = {}
        self.kernels: dict[str, dict[str, Any]] = {}
        """The number, the milliseconds and the longest kernels of a step, by way."""
        self.left_out: dict[str, str] = {}
        """Reasons why ways were not run, by way."""
        self._called: set[Key] = set()
        self._times: dict[Key, float] = {}
        self._blocks: dict[Key, tuple[int, list[float]]] = {}
        """The process that each time comes from, and the times of its blocks there."""
        for place, run in enumerate(runs):
            self._add(place, run)

    def _add(self, place: int, run: Run) -> None:
        here = {
            (way, "" if WAYS[way].is_ours else run["pytorch"]): times
            for way, times in run.get("times_ms", {}).items()
        }
        ways = list(WAYS)
        shared = sorted(self._times.keys() & here.keys(), key=lambda k: (k[1], ways.index(k[0])))
        if place and not shared:
            return
        for key in [key for key in here if key not in self._times]:
            self._times[key] = numbers.median(here[key])
            if place:
                ratios = _ratios(here[key], here[shared[0]])
                self._times[key] = self._times[shared[0]] * numbers.median(ratios)
            self._blocks[key] = (place, here[key])
            if key[0] in run.get("by_calls", ()):
                self._called.add(key)
        self.ways = {**run["ways"], **self.ways}
        self.peak_bytes = {**run.get("peak_bytes", {}), **self.peak_bytes}
        self.kernels = {**run.get("kernels", {}), **self.kernels}
        self.left_out |= run.get("left_out", {})

    @property
    def times_ms(self) -> dict[Key, float]:
        """Milliseconds a step, by way and PyTorch's mode."""
        return self._times

    @property
    def ours(self) -> dict[str, float]:
        """Our way -> milliseconds a step."""
        return {way: ms for (way, mode), ms in self._times.items() if not mode}

    def pytorch(self) -> dict[Key, float]:
        """(way of PyTorch's, mode) -> milliseconds a step."""
        return {key: ms for key, ms in self._times.items() if key[1]}

    def cell(self, way: str, mode: str = "") -> str:
        """The milliseconds of a way, and a star if they are those of calls."""
        key = (way, mode)
        return number(self._times.get(key)) + ("*" if key in self._called else "")

    def rival(self, way: str) -> Key | None:
        """PyTorch's fastest way with which one of ours is compared (see ``_against``)."""
        found = self.pytorch()
        allowed = [k for k in found if (WAYS[k[0]].compile is not None) == _compiles(way)]
        return min(allowed, key=found.__getitem__, default=None)

    def against(self, way: str, other: Key | None = None) -> Ratio | None:
        """The time of another way, the rival without one, over that of a way of ours."""
        ours, other = (way, ""), other or self.rival(way)
        if ours not in self._times or other is None:
            return None
        (one, mine), (two, theirs) = self._blocks[ours], self._blocks[other]
        if one != two:
            return Ratio([self._times[other] / self._times[ours]])
        return Ratio(_ratios(theirs, mine))


class Ratio:
    """Ratios of the blocks of one round each: the clock may drift from round to round."""

    def __init__(self, ratios: list[float]) -> None:
        self.median = numbers.median(ratios)
        self.quartiles = (numbers.quantile(ratios, 0.25), numbers.quantile(ratios, 0.75))
        self.is_wide = any(abs(q / self.median - 1) > _WIDE for q in self.quartiles)

    def __str__(self) -> str:
        low, high = self.quartiles
        return f"{self.median:.3f}" + (f" ({low:.3f} to {high:.3f})" if self.is_wide else "")


def _ratios(theirs: list[float], ours: list[float]) -> list[float]:
    """Of the blocks of two ways in one process, round by round."""
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def _compiles(way: str) -> bool:
    """Whether a way of ours makes one program of the model, as torch.compile does."""
    return WAYS[way].compile is not None or WAYS[way].prepare == "fuse"


def _against(way: str) -> str:
    """The header of ratios of a way of ours."""
    return f"{'best torch.compile' if _compiles(way) else 'eager'} / {WAYS[way].label}"


def rows(data: dict[str, Any]) -> list[Row]:
    """Returns the cases of a record, or of merged ones. A process that measured all ways of an
    earlier one, by the same mode of PyTorch's, takes its place."""
    found: dict[Any, list[Run]] = {}
    for run in data["results"].get("runs", []):
        batch = run.get("batch", data["arguments"].get("batch"))  # one for all in older records
        runs = found.setdefault((run["model"], run["step"], run["layout"], batch), [])
        runs[:] = [one for one in runs if not _replaces(run, one)] + [run]
    return [Row(key, runs) for key, runs in found.items()]


def _replaces(run: Run, earlier: Run) -> bool:
    ways = run.get("times_ms", {}).keys()
    return run["pytorch"] == earlier["pytorch"] and ways >= earlier.get("times_ms", {}).keys()


def tables(data: dict[str, Any]) -> list[Table]:
    """Of a record, or of several whose runs were put together."""
    found = rows(data)
    shown = [_means(found), _steps(data, found), *_rates(found)]
    shown += [*_trained(found), *_by_way(data, found), *_kernels(found)]
    shown[-1].note += "".join(f" {text}." for text in data["results"].get("failures", []))
    return shown


def _ours(found: list[Row]) -> list[str]:
    """Our ways that the rows have, in the order of WAYS."""
    return [way for way in WAYS if any(way in row.ours for row in found)]


def _means(found: list[Row]) -> Table:
    ratios: dict[str, dict[Row, float]] = {}
    for row in found:
        wanted = [(_against(way), row.against(way)) for way in _ours(found)]
        layouts = {way: row.ours[way] for way in ("convert", "convert_last") if way in row.ours}
        if len(layouts) == 2:
            better = (min(layouts, key=layouts.__getitem__), "")
            text = "convert in the better layout / layout auto"
            wanted.append((text, row.against("convert_auto", better)))
        engines = "convert_engines"
        if engines in row.ours:
            text = f"{WAYS[engines].label} / convert"
            wanted.append((text, row.against("convert", (engines, ""))))
        for text, ratio in wanted:
            if ratio is not None:
                ratios.setdefault(text, {})[row] = ratio.median
    table = Table(
        "Whole models: PyTorch's time over ours, geometric means",
        ["cases", *ratios],
        note="Above 1, ours is faster. In brackets: the least, the most, and in how many cases "
        "ours is more than 1 % slower. Eager, and the best torch.compile, are the fastest of the "
        "columns below, of all of PyTorch's modes.",
    )
    groups = {"all": found}
    for row in found:
        size = "batch 1" if row.batch == 1 else "larger batches"
        groups.setdefault(f"{STEPS[row.step]}, {size}", []).append(row)
    if len({row.layout for row in found}) > 1:
        for row in found:
            groups.setdefault(f"{STEPS[row.step]}, {row.layout}", []).append(row)
    for title, mine in groups.items():
        cells = [_mean([each[row] for row in mine if row in each]) for each in ratios.values()]
        table.rows.append((f"{title}: {len(mine)}", *cells))
    return table


def _mean(ratios: list[float]) -> str:
    if not ratios:
        return NONE
    slower = sum(ratio < 1 / _SLOWER for ratio in ratios)
    ends = f"{min(ratios):.3f} to {max(ratios):.3f}, {slower} of {len(ratios)}"
    return f"{numbers.geometric_mean(ratios):.3f} ({ends})"


def _steps(data: dict[str, Any], found: list[Row]) -> Table:
    asked, ours = data["arguments"], _ours(found)
    known = {column for row in found for column in row.pytorch()}
    theirs = [(way, mode) for way in WAYS for mode in PYTORCH if (way, mode) in known]
    table = Table(
        "Steps (ms)",
        [
            *_CASE,
            *(f"{WAYS[way].label}, {PYTORCH[mode]}" for way, mode in theirs),
            *(WAYS[way].label for way in ours),
            *map(_against, ours),
        ],
        note=f"Inference in {asked.get('dtype', 'float16')}, training (forward and backward) in "
        "bfloat16 by autocast. CUDA graphs of whole steps in turns, "
        f"{asked['rounds']} blocks of {asked['block_ms']:.0f} ms each; medians. Ratios are medians "
        "of those of the blocks of one round, with quartiles "
        f"where these are more than 1 % away. Ours by {asked['sampling']}. Times of other "
        "processes, as of PyTorch's other modes, are brought to the first one's by what a way took "
        "in both. *: plain calls, since no graph was captured."
        + _left_out(found)
        + dry_run_note(data),
        texts=len(_CASE),
    )
    for row in found:
        cells = [row.cell(way, mode) for way, mode in theirs]
        cells += [row.cell(way) for way in ours]
        cells += [str(row.against(way) or NONE) for way in ours]
        table.rows.append((*row.case, *cells))
    return table


def _left_out(found: list[Row]) -> str:
    reasons = {f" {WAYS[way].label}: {why}." for row in found for way, why in row.left_out.items()}
    return "".join(sorted(reasons))


def _rates(found: list[Row]) -> list[Table]:
    """Samples per second of the steps with an optimizer, if there are any."""
    trained = [row for row in found if row.step == "optimize"]
    if not trained:
        return []
    known = {column for row in trained for column in row.times_ms}
    columns = [(way, mode) for way in WAYS for mode in ("", *PYTORCH) if (way, mode) in known]
    labels = [WAYS[way].label + (f", {PYTORCH[mode]}" if mode else "") for way, mode in columns]
    table = Table("Samples per second", [*_CASE, *labels], texts=len(_CASE))
    for row in trained:
        times = [row.times_ms.get(column) for column in columns]
        rates = [number(None if ms is None else 1e3 * row.batch / ms, 0) for ms in times]
        table.rows.append((*row.case, *rates))
    return [table]


def _trained(found: list[Row]) -> list[Table]:
    """Returns a table of training: ratios of our first steps and memory to PyTorch's; none without
    a training step."""
    trained = [row for row in found if row.step != "infer"]
    ours = _ours(trained)
    first: dict[str, list[float | None]] = {}
    memory: dict[str, list[float | None]] = {}
    for way in ours:
        seconds = [(_first_step(row, way), _first_step(row, "compile")) for row in trained]
        if _compiles(way):
            first[f"{WAYS[way].label} / compile: first step"] = [_over(*two) for two in seconds]
        sizes = [(row.peak_bytes.get(way), _peak_of_rival(row, way)) for row in trained]
        theirs = "best torch.compile" if _compiles(way) else "eager"
        memory[f"{WAYS[way].label} / {theirs}: memory"] = [_over(*two) for two in sizes]
    columns = {name: ratios for name, ratios in (first | memory).items() if any(ratios)}
    if not columns:
        return []
    table = Table(
        "Training: ours over PyTorch's, the first step and the memory",
        [*_CASE, *columns],
        note="The first step is over that of compile, the most memory of a later step over that of "
        "PyTorch's fastest. Last: the median, and the most.",
        texts=len(_CASE),
    )
    for row, cells in zip(trained, zip(*columns.values(), strict=True), strict=True):
        if any(cells):
            table.rows.append((*row.case, *map(number, cells)))
    known = [[ratio for ratio in ratios if ratio] for ratios in columns.values()]
    last = [f"{numbers.median(ratios):.3f} ({max(ratios):.3f})" for ratios in known]
    table.rows.append(("median (most)", "", *last))
    return [table]


def _first_step(row: Row, way: str) -> float | None:
    return row.ways.get(way, {}).get("first_step_s")


def _peak_of_rival(row: Row, way: str) -> int | None:
    rival = row.rival(way)
    return row.peak_bytes.get(rival[0]) if rival else None


def _over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def _by_way(data: dict[str, Any], found: list[Row]) -> list[Table]:
    """What is known of each way beside the times of its steps."""
    ways = [way for way in WAYS if any(way in row.ways for row in found)]
    labels = [WAYS[way].label for way in ways]
    at_once = data["arguments"].get("at_once")  # not in older records
    # Records without the option are of a time when the ways shared a cache.
    found_before = "tuned" if "kernels" in data["arguments"] else "tuned or compiled"
    shared = f"; up to {at_once} such processes share the CPU" if at_once else ""
    first = Table(
        "The first step, and the memory of a later one",
        [*_CASE, *(f"{label} (s)" for label in labels), *(f"{label} (MiB)" for label in labels)],
        note="Seconds of compiling, tuning and running, one way after the other in one process, so "
        f"that later ways find what earlier ones have {found_before}{shared}. MiB: the most "
        "that a step has at a time, beside the model and its inputs.",
        texts=len(_CASE),
    )
    off = Table(
        "How far the results are off",
        [*_CASE, *labels, "further off than PyTorch's"],
        note="The norm of the difference from what float32 gives, over the norm of that: of the "
        "outputs; in training, of the gradients of the convolutions' weights too (their median).",
        texts=len(_CASE),
    )
    for row in found:
        seconds = [row.ways.get(way, {}).get("first_step_s") for way in ways]
        memory = [row.peak_bytes.get(way) for way in ways]
        cells = [number(None if size is None else size / 2**20, 0) for size in memory]
        first.rows.append((*row.case, *(number(value, 1) for value in seconds), *cells))
        errors = {way: dict(row.ways.get(way, {}).get("errors", {})) for way in ways}
        beyond = [(way, mine.pop("beyond", [])) for way, mine in errors.items()]
        texts = (f"{way}: {', '.join(names)}" for way, names in beyond if names)
        cells = ["; ".join(map(_error, mine.values())) or NONE for mine in errors.values()]
        off.rows.append((*row.case, *cells, "; ".join(texts) or "none"))
    return [first, off]


def _kernels(found: list[Row]) -> list[Table]:
    """Returns a table of the longest kernels of each way's step; none where no run has them."""
    table = Table(
        "Longest kernels of a step",
        [*_CASE, "way", "launches", "ms", "the longest, with their launches and ms"],
        note="As a profiler sees one step. Kernels that run beside others count in full.",
        texts=len(_CASE) + 1,
    )
    for row in found:
        for way in (way for way in WAYS if way in row.kernels):
            seen = row.kernels[way]
            longest = (
                f"{name[:_NAME]} {launches}, {number(ms)}"
                for name, launches, ms in seen["longest"][:_LONGEST]
            )
            counts = (str(seen["launches"]), number(seen["ms"]))
            table.rows.append((*row.case, WAYS[way].label, *counts, "; ".join(longest)))
    return [table] if table.rows else []


def _error(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def has_points(data: dict[str, Any]) -> bool:
    """Whether a way of ours has a way of PyTorch's to be compared with in a plot."""
    return any(row.against(way) for row in rows(data) for way in row.ours)


def plot(data: dict[str, Any], path: Path) -> None:
    """Draws of each case the time of PyTorch's over ours, with quartiles where these are wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [row for row in rows(data) if any(row.against(way) for way in row.ours)]
    size = (9, 1.5 + 0.24 * len(found))
    figure, axis = pyplot.subplots(figsize=size, constrained_layout=True)
    for place, way in enumerate(_ours(found)):
        points = {y: ratio for y, row in enumerate(found) if (ratio := row.against(way))}
        medians, marker = [ratio.median for ratio in points.values()], "osD^v"[place % 5]
        (drawn,) = axis.plot(medians, [*points], marker, label=_against(way), alpha=0.8)
        for y, ratio in points.items():
            if ratio.is_wide:
                axis.plot(ratio.quartiles, (y, y), color=drawn.get_color(), linewidth=1)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(range(len(found)), [", ".join(row.case) for row in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    least, most = axis.get_xlim()
    axis.set_xticks([tick for tick in _TICKS if least <= tick <= most])
    axis.minorticks_off()
    axis.grid(axis="x", alpha=0.3)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("PyTorch's time / ours: above 1, ours is faster")
    axis.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
