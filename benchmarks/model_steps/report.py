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
    """A case, with the processes that measured it; the first that ran the most ways is the main
    one. What only another one has is brought to the main one's times: multiplied by what a way took
    in the main one, over what it took there, one of ours if there is any."""

    def __init__(self, key: tuple[str, str, str, int], runs: list[Run]) -> None:
        model, self.step, layout, self.batch = key
        self.case = (model, f"{STEPS[self.step]}, {layout}, {self.batch}")
        order = list(PYTORCH)
        runs = sorted(runs, key=lambda run: (-_count(run), order.index(run["pytorch"])))
        self.ways: dict[str, dict[str, Any]] = {}
        """What is known of each way beside its times, from the first process that has it."""
        self.peak_bytes: dict[str, int] = {}
        self._called: set[tuple[str, str]] = set()
        self._times: dict[tuple[str, str], float] = {}
        for run in runs:
            self._add(run, is_main=run is runs[0])

    def _add(self, run: Run, *, is_main: bool) -> None:
        found = run.get("times_ms", {})
        here = {self._key(way, run): numbers.median(times) for way, times in found.items()}
        shared = sorted(
            self._times.keys() & here.keys(), key=lambda key: (key[1], list(WAYS).index(key[0]))
        )
        if not is_main and not shared:
            return
        scale = 1.0 if is_main else self._times[shared[0]] / here[shared[0]]
        for key, ms in here.items():
            if key not in self._times:
                self._times[key] = ms * scale
                if key[0] in run.get("by_calls", ()):
                    self._called.add(key)
        self.ways = {**run["ways"], **self.ways}
        self.peak_bytes = {**run.get("peak_bytes", {}), **self.peak_bytes}

    @staticmethod
    def _key(way: str, run: Run) -> tuple[str, str]:
        """PyTorch's modes make no difference to ours."""
        return way, "" if WAYS[way].is_ours else run["pytorch"]

    @property
    def ours(self) -> dict[str, float]:
        """Our way -> milliseconds a step."""
        return {way: ms for (way, mode), ms in self._times.items() if not mode}

    def pytorch(self) -> dict[tuple[str, str], float]:
        """(way of PyTorch's, mode) -> milliseconds a step."""
        return {key: ms for key, ms in self._times.items() if key[1]}

    def cell(self, way: str, mode: str = "") -> str:
        """The milliseconds of a way, and a star if they are those of calls."""
        key = (way, mode)
        return number(self._times.get(key)) + ("*" if key in self._called else "")

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
    found: dict[Any, list[Run]] = {}
    for run in data["results"].get("runs", []):
        batch = run.get("batch", data["arguments"].get("batch"))  # one for all in older records
        found.setdefault((run["model"], run["step"], run["layout"], batch), []).append(run)
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
        layouts = [row.ours[way] for way in ("convert", "convert_last") if way in row.ours]
        better = min(layouts) if len(layouts) == 2 else None
        wanted.append(("convert in the better layout / layout auto", better, "convert_auto"))
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
        f"each; medians. Ours by {asked['sampling']}. Times of other processes, as of "
        "PyTorch's other modes, are brought to the first one's by what a way took in both. "
        "*: plain calls, since no graph was captured." + dry_run_note(data),
        texts=len(_CASE),
    )
    for row in found:
        best = row.best()
        cells = [row.cell(way, mode) for way, mode in theirs]
        cells += [row.cell(way) for way in ours]
        cells += [number(best / row.ours[w] if best and w in row.ours else None) for w in ours]
        table.rows.append((*row.case, *cells))
    return table


def _by_way(found: list[Row]) -> list[Table]:
    """What is known of each way beside the times of its steps."""
    ways = [way for way in WAYS if any(way in row.ways for row in found)]
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
