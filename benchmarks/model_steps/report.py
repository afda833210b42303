"""What a record of models.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import NONE, Table, dry_run_note, number

from .cases import PYTORCH, STEPS, WAYS

Run = dict[str, Any]
_SLOWER = 1.01
_CASE = ("model", "step, layout, batch")


def _count(run: Run) -> int:
    return len(run.get("times_ms", {}))


class Row:
    """A case, with what measured it by PyTorch's mode; the first that ran the most ways is
    the main one."""

    def __init__(self, key: tuple[str, str, str, int], runs: dict[str, Run]) -> None:
        model, self.step, layout, self.batch = key
        self.case = (model, f"{STEPS[self.step]}, {layout}, {self.batch}")
        self.runs = runs
        self.main = max(filter(runs.__contains__, PYTORCH), key=lambda mode: _count(runs[mode]))
        self.ours = {w: ms for w, ms in self.times(self.main).items() if WAYS[w].is_ours}

    def times(self, mode: str) -> dict[str, float]:
        """Way -> milliseconds a step in one process: medians."""
        found = self.runs[mode].get("times_ms", {})
        return {way: numbers.median(times) for way, times in found.items()}

    def pytorch(self) -> dict[tuple[str, str], float]:
        """(way of PyTorch's, mode) -> milliseconds a step. What another process than the main one
        timed is multiplied by what one of our ways took in the main one, over what it took there.
        """
        found = {}
        for mode in self.runs:
            here = self.times(mode)
            scales = [1.0] if mode == self.main else []
            scales += [ms / here[way] for way, ms in self.ours.items() if way in here]
            if scales:
                theirs = {way: ms for way, ms in here.items() if not WAYS[way].is_ours}
                found |= {(way, mode): ms * scales[0] for way, ms in theirs.items()}
        return found

    def best(self, *, compiled: bool = False) -> float | None:
        """Milliseconds a step of PyTorch's fastest way, or of its fastest compiled one."""
        found = self.pytorch().items()
        allowed = [ms for (way, _), ms in found if not compiled or WAYS[way].compile is not None]
        return min(allowed, default=None)

    def eager_on(self) -> float | None:
        """Milliseconds a step of PyTorch's faster eager one with benchmark on."""
        found = self.pytorch().items()
        allowed = [ms for (w, mode), ms in found if w == "eager" and mode != "pytorch_off"]
        return min(allowed, default=None)


def rows(data: dict[str, Any]) -> list[Row]:
    found: dict[Any, dict[str, Run]] = {}
    for run in data["results"].get("runs", []):
        batch = run.get("batch", data["arguments"].get("batch"))  # one for all in older records
        mine = found.setdefault((run["model"], run["step"], run["layout"], batch), {})
        if _count(run) >= _count(mine.get(run["pytorch"], {})):
            mine[run["pytorch"]] = run
    return [Row(key, runs) for key, runs in found.items()]


def tables(data: dict[str, Any]) -> list[Table]:
    """Of a record, or of several whose runs were put together."""
    found = rows(data)
    shown = [_means(found), _steps(data, found), *_by_way(found)]
    shown[-1].note += "".join(f" {text}." for text in data["results"].get("failures", []))
    return shown


def _ours(found: list[Row]) -> list[str]:
    """Our ways that the rows have, in the order of WAYS."""
    return [way for way in WAYS if any(way in row.ours for row in found)]


def _means(found: list[Row]) -> Table:
    ratios: dict[str, dict[Row, float]] = {}
    for row in found:
        wanted = [(f"best of PyTorch's / {WAYS[way].label}", row.best(), way) for way in WAYS]
        wanted.append(("eager, benchmark on / convert", row.eager_on(), "convert"))
        for way in ("backend", "compile_ours"):
            text = f"best torch.compile / {WAYS[way].label}"
            wanted.append((text, row.best(compiled=True), way))
        for text, theirs, way in wanted:
            if theirs is not None and way in row.ours:
                ratios.setdefault(text, {})[row] = theirs / row.ours[way]
    table = Table(
        "Whole models: PyTorch's time over ours, geometric means",
        ["cases", *ratios],
        note="Above 1, ours is faster. In brackets: the least, the most, and in how many cases "
        "ours is more than 1 % slower. The best of PyTorch's is of all its columns below.",
    )
    groups = {"all": found}
    for row in found:
        size = "batch 1" if row.batch == 1 else "larger batches"
        groups.setdefault(f"{STEPS[row.step]}, {size}", []).append(row)
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
            *(f"best of PyTorch's / {WAYS[way].label}" for way in ours),
        ],
        note="Inference in float16, training (forward and backward) in bfloat16 by autocast. CUDA "
        f"graphs of whole steps in turns, {asked['rounds']} blocks of {asked['block_ms']:.0f} ms "
        f"each; medians. Ours by {asked['sampling']}. Times of PyTorch's other modes are of their "
        "own processes, brought to the first one's by what one of our ways took in both. *: plain "
        "calls, since no graph was captured." + dry_run_note(data),
        texts=len(_CASE),
    )
    for row in found:
        times, best = row.pytorch(), row.best()
        cells = [number(times.get((w, mode))) + _mark(row.runs.get(mode), w) for w, mode in theirs]
        cells += [number(row.ours.get(way)) + _mark(row.runs[row.main], way) for way in ours]
        cells += [number(best / row.ours[w] if best and w in row.ours else None) for w in ours]
        table.rows.append((*row.case, *cells))
    return table


def _mark(run: Run | None, way: str) -> str:
    return "*" if run and way in run.get("by_calls", ()) else ""


def _by_way(found: list[Row]) -> list[Table]:
    """What the main processes tell of each way, beside the times of its steps."""
    mains = [(row.case, row.runs[row.main]) for row in found]
    ways = [way for way in WAYS if any(way in run["ways"] for _, run in mains)]
    labels = [WAYS[way].label for way in ways]
    first = Table(
        "The first step, and the memory of a later one",
        [*_CASE, *(f"{label} (s)" for label in labels), *(f"{label} (MiB)" for label in labels)],
        note="Seconds of compiling, tuning and running, one way after the other in one process, so "
        "that later ways find what earlier ones have tuned or compiled. MiB: the most that a step "
        "has at a time, beside the model and its inputs.",
        texts=len(_CASE),
    )
    off = Table(
        "How far the results are off",
        [*_CASE, *labels, "further off than PyTorch's"],
        note="The norm of the difference from what float32 gives, over the norm of that: of the "
        "outputs; in training, of the gradients of the convolutions' weights too (their median).",
        texts=len(_CASE),
    )
    for case, run in mains:
        seconds = [run["ways"].get(way, {}).get("first_step_s") for way in ways]
        memory = [run.get("peak_bytes", {}).get(way) for way in ways]
        cells = [number(None if size is None else size / 2**20, 0) for size in memory]
        first.rows.append((*case, *(number(value, 1) for value in seconds), *cells))
        errors = {way: dict(run["ways"].get(way, {}).get("errors", {})) for way in ways}
        beyond = [(way, mine.pop("beyond", [])) for way, mine in errors.items()]
        texts = (f"{way}: {', '.join(names)}" for way, names in beyond if names)
        cells = ["; ".join(map(_error, mine.values())) or NONE for mine in errors.values()]
        off.rows.append((*case, *cells, "; ".join(texts) or "none"))
    return [first, off]


def _error(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def plot(data: dict[str, Any], path: Path) -> None:
    """Draws each case's best time of PyTorch's over ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [row for row in rows(data) if row.best() and row.ours]
    size = (9, 1.5 + 0.24 * len(found))
    figure, axis = pyplot.subplots(figsize=size, constrained_layout=True)
    for place, way in enumerate(_ours(found)):
        points = {y: row.best() / row.ours[way] for y, row in enumerate(found) if way in row.ours}
        marker = "osD^v"[place % 5]
        axis.plot([*points.values()], [*points], marker, label=WAYS[way].label, alpha=0.8)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(range(len(found)), [", ".join(row.case) for row in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.grid(axis="x", which="both", alpha=0.3)
    axis.xaxis.set_major_formatter("{x:.2f}")
    axis.xaxis.set_minor_formatter("{x:.2f}")
    axis.set_xlabel("best of PyTorch's time / ours: above 1, ours is faster")
    axis.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
