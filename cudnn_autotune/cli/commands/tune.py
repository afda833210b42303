"""``cudnn-autotune tune``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich import progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cudnn_autotune import sampling
from cudnn_autotune.cli import decision_table, wording
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.stores import store_option
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count, milliseconds, printable
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.models.memory_format import CANDIDATES
from cudnn_autotune.models.problems import calls_of
from cudnn_autotune.models.tune import Tuned, passes
from cudnn_autotune.models.tune import tune_problems as tune_all
from cudnn_autotune.models.tuning import Progress, progress_bar
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision, was_cut_short
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.tools import gpu_peaks, options
from cudnn_autotune.tools.options import refuse
from cudnn_autotune.tuning import events, settings, tune_problem

_OF_LAYERS = ("weight", "op", "stride", "padding", "dilation", "groups", "bias")
# The remaining time is estimated from all searches, which differ much, not from the last ones.
_ESTIMATED_OVER_S = 3600.0


TuneTogether = Callable[
    [Mapping[ConvProblem, int], str, float | None, bool, Callable[[Progress], None]],
    list[Decision],
]


@dataclass(frozen=True)
class Bench:
    """The functions that tune: on the GPU, unless a program that invokes the command passes others
    as the context's object."""

    environment: Environment
    device: torch.device
    tune: Callable[[ConvProblem, str], Decision]
    """Tunes a problem in a sampling mode, and returns the decision."""
    calls_of: Callable[..., Mapping[ConvProblem, int]]
    """Called as ``calls_of(model, *inputs)``; returns the problems of the model's convolutions, and
    how often the model calls each."""
    tune_together: TuneTogether | None = None
    """Tunes the problems of a model in one race, and stores each decision as soon as it is made;
    called as ``models.tune.tune_problems`` without its device. None: each is tuned by itself."""


@click.command()
@click.argument("model", required=False)
@options.shape_options
@click.option(
    "--train/--inference",
    default=None,
    help="Tune a model forward and backward, or forward only. [default: inference]",
)
@click.option(
    "--memory-format",
    type=click.Choice(["auto"]),
    help="Tune a model in both layouts, and time its step in each.",
)
@click.option("--sampling", "mode", help="The sampling mode. [default: the one in force]")
@click.option(
    "--budget-ms", type=options.POSITIVE, metavar="MS", help="The most ms of each choice."
)
@click.option(
    "--budget-s",
    type=options.TOLERANCE,
    metavar="S",
    help="The most seconds of a whole model's race; 0 times nothing.",
)
@click.option("--retune", is_flag=True, help="Tune again what the store knows.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: the gain, and each decision.")
@store_option
@click.pass_context
def tune(ctx: click.Context, /, model: str | None, store_path: Path | None, **given: Any) -> None:
    """Tune a layer, or every convolution of a model, into the store.

    A layer is given by --input and --weight. A MODEL is torchvision:NAME, timm:NAME, or
    MODULE:CALLABLE: my_net:make is what make() in my_net.py, in this folder, returns: a model, or
    (model, inputs). What the store knows is not tuned again. Tuning needs a GPU;
    CUDA_VISIBLE_DEVICES chooses among several. The last line says what is gained over PyTorch.
    After Ctrl-C, what was decided is shown and kept.
    """
    mode = _mode(given["mode"])
    if model is None:
        if not given["input"]:
            raise refuse("--input", "is needed for a layer; a model is named as MODEL")
        if given["weight"] is None:
            raise refuse("--weight", "is needed for a layer; a model is named as MODEL")
        if len(given["input"]) > 1:
            raise refuse("--input", "once for a layer")
        if given["train"] is not None:
            raise refuse("--train/--inference", "only with a MODEL; for a layer there is --op")
        if given["memory_format"] is not None:
            raise refuse("--memory-format", "only with a MODEL")
    else:
        for name in _OF_LAYERS:
            if given[name] not in (None, ()):
                raise refuse(f"--{name}", "not with a MODEL: it says itself what it computes")
        if given["memory_format"] is not None and given["channels_last"]:
            raise refuse("--memory-format", "not with --channels-last: both layouts are tried")
    given["train"] = bool(given["train"])
    # Arguments are judged before the GPU is opened, so that their errors are said without one.
    # A model is made last, since that takes seconds.
    calls: Mapping[ConvProblem, int]
    calls = {} if model is not None else dict.fromkeys(tune_problems.of_layer(given), 1)
    budget_ms = given["budget_ms"] or settings.get_budget_ms()
    is_whole = model is not None and budget_ms is None and sampling.traits(mode).races_models
    if given["budget_s"] is not None and not is_whole:
        raise refuse("--budget-s", "only with a MODEL, in mode auto, and not with --budget-ms")
    is_auto = given["memory_format"] is not None
    loaded, inputs = (None, None) if model is None else tune_problems.load(model, given["input"])
    with _bench(ctx, store_path) as bench:
        if model is not None and loaded is not None:
            last = bool(given["channels_last"])
            subject = tune_problems.Model(
                model, loaded, given, bench.device, inputs, channels_last=last
            )
            layouts = [torch.channels_last if last else None]
            if is_auto:
                layouts = [torch.contiguous_format, torch.channels_last]
            by_layout = [subject.problems(bench.calls_of, layout) for layout in layouts]
            calls = {problem: n for found in by_layout for problem, n in found.items()}
            if not calls:
                click.echo(f"{model} has no convolution to tune", err=given["as_json"])
                if given["as_json"]:
                    decision_table.print_json({"gain": None}, ())
                return
        with settings.flags(mode, budget_ms=budget_ms):
            store = Store(store_path, bench.environment)
            if not store.is_writable:
                raise refuse("--store", f"{store.path} cannot be written to")
            begin_s = time.monotonic()
            if is_whole and bench.tune_together is not None:
                made = _race(calls, bench.tune_together, mode, store, given)
            else:
                made = _run(list(calls), bench, mode, store, given)
            took_s = time.monotonic() - begin_s
            name = passes(model, given["train"]) if model else " + ".join(p.op for p in calls)
            layout = None
            if is_auto and not made.is_interrupted:
                faster = subject.faster_layout()
                layout = f"{model}: {faster}"
                calls = by_layout[CANDIDATES.index(faster.chosen)]
            elif is_auto:
                calls = by_layout[0]
            tuned = Tuned(made.decisions, calls, name, took_s)
            _show(tuned, made, store, layout, given["as_json"])


def _mode(given: str | None) -> str:
    mode = settings.registered_mode(settings.get_sampling()) if given is None else given
    options.check_modes("--sampling", [mode], sampling.names())
    if sampling.traits(mode).decides_later:
        raise refuse("--sampling", f"{mode!r} decides in a program's own calls, not beforehand")
    return mode


@contextmanager
def _bench(ctx: click.Context, store_path: Path | None) -> Iterator[Bench]:
    if store_settings.is_locked():
        variable = store_settings.MODE_VARIABLE
        raise click.UsageError(f"{variable}=locked forbids to tune; unset it for this command")
    if isinstance(ctx.obj, Bench):
        yield ctx.obj
        return
    if not extension_available() or not torch.cuda.is_available():
        why = "there is no CUDA GPU here" if extension_available() else "this torch has no CUDA"
        raise click.ClickException(
            f"tuning needs a GPU, and {why}; without one: `import` decisions that were tuned "
            "elsewhere, `show --store FILE` and `report` what is in them, `audit --replay` and "
            "`demo` to see the sampling modes at work"
        )
    index = torch.cuda.current_device()
    before = store_settings.get_store_settings()
    # The command itself looks into the store and writes it. A search reads it for the choices of
    # similar problems.
    store_settings.set_store(store_path, mode="read")

    def together(
        calls: Mapping[ConvProblem, int],
        mode: str,
        budget_s: float | None,
        retune: bool,
        report: Callable[[Progress], None],
    ) -> list[Decision]:
        store_settings.set_store(store_path, mode="read_write")
        return tune_all(calls, index, mode, budget_s, report, retune=retune)

    try:
        yield Bench(
            Environment.of(index),
            torch.device("cuda", index),
            lambda problem, mode: tune_problem.tune(problem, index, mode, retune=True),
            calls_of,
            together,
        )
    finally:
        store_settings.restore_settings(before)


@dataclass
class Outcome:
    """The decisions of a run, and the problems that failed."""

    decisions: list[Decision] = field(default_factory=list)
    known: int = 0
    """The number of decisions that the store already had."""
    failed: list[tuple[ConvProblem, str]] = field(default_factory=list)
    """The problems without a decision, and the error of each."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended the run."""


def _race(
    calls: Mapping[ConvProblem, int],
    tune_together: TuneTogether,
    mode: str,
    store: Store,
    given: dict[str, Any],
) -> Outcome:
    """Tunes the problems of a model in one race."""
    try:
        console = decision_table.console(given["as_json"])
        with events.SEARCHES.shown_elsewhere(), progress_bar(console) as report:
            decisions = tune_together(calls, mode, given["budget_s"], given["retune"], report)
    except KeyboardInterrupt:
        found = (_known(problem, Store(store.path, store.environment), mode) for problem in calls)
        return Outcome([one for one in found if one is not None], is_interrupted=True)
    except RuntimeError as error:
        if _is_device_lost(error):
            raise _gpu_fails(str(error), store) from error
        raise click.ClickException(f"{error}; {_kept(store)}") from error
    return Outcome(decisions)


def _run(
    problems: list[ConvProblem], bench: Bench, mode: str, store: Store, given: dict[str, Any]
) -> Outcome:
    """Tunes one problem after the other."""

    def known(problem: ConvProblem) -> Decision | None:
        found = None if given["retune"] else _known(problem, store, mode)
        is_unfit = found is None or was_cut_short(found, settings.get_budget_ms())
        return None if is_unfit else found

    console = decision_table.console(given["as_json"])
    return tune_each(problems, lambda problem: bench.tune(problem, mode), store, known, console)


def tune_each(
    problems: Sequence[ConvProblem],
    tune: Callable[[ConvProblem], Decision],
    store: Store,
    known: Callable[[ConvProblem], Decision | None],
    console: Console,
) -> Outcome:
    """Tunes the problems that are not ``known``, with a line for each choice and a progress bar,
    and stores each decision as soon as it is made. If ``tune`` raises RuntimeError for a problem,
    the others go on, unless the GPU fails (ClickException). Ctrl-C ends the run.
    """
    made = Outcome()
    found = {problem: known(problem) for problem in problems}
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = progress.Progress(
        *columns,
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=_ESTIMATED_OVER_S,
    )
    with events.SEARCHES.shown_elsewhere(), bar:
        task = bar.add_task("tuning", total=sum(each is None for each in found.values()))
        for problem, decision in found.items():
            if decision is not None:
                made.known += 1
                note = ", known already"
            else:
                try:
                    decision = tune(problem)
                except KeyboardInterrupt:
                    made.is_interrupted = True
                    break
                except RuntimeError as error:
                    if _is_device_lost(error):
                        where = f"{problem.op} {wording.shapes(problem)}"
                        raise _gpu_fails(f"{where}: {error}", store) from error
                    why = str(error)
                    if isinstance(error, torch.OutOfMemoryError):
                        why = f"out of memory: {why.splitlines()[0]}"
                    made.failed.append((problem, why))
                    _say(console, problem, f"not tuned: {why}")
                    continue
                finally:
                    bar.advance(task)
                note = ", nothing was timed"
                if provisional := decision.selection.evidence.provisional:
                    note = f", not kept: provisional, {provisional}"
                elif decision.selection.total_samples > 0:
                    store.add([decision])
                    note = ""
            made.decisions.append(decision)
            _say(console, problem, _described(decision) + note)
    return made


def _is_device_lost(error: RuntimeError) -> bool:
    """Returns whether the CUDA context is unusable after an error: every later call fails too."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _gpu_fails(why: str, store: Store) -> click.ClickException:
    return click.ClickException(f"the GPU fails; {_kept(store)}: {why}")


def _kept(store: Store) -> str:
    return f"what was decided before is kept in {store.path}"


def _say(console: Console, problem: ConvProblem, text: str) -> None:
    line = printable(f"{problem.op} {wording.shapes(problem)}: {text}")
    # The texts are not parsed as markup, since they contain brackets.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _described(decision: Decision) -> str:
    chosen = decision.chosen
    if chosen is None:
        return "aten: every other's output was wrong"
    parts = [chosen.candidate.text]
    if chosen.reported_ms is not None:
        parts.append(f"{milliseconds(chosen.reported_ms)} ms")
    if chosen.candidate.workspace_bytes:
        parts.append(f"workspace {wording.size(chosen.candidate.workspace_bytes)}")
    if rule := decision.selection.evidence.rule_in_words:
        parts.append(rule)
    return ", ".join(parts)


def _known(problem: ConvProblem, store: Store, mode: str) -> Decision | None:
    return store.find(
        problem,
        sampling=mode,
        workspace_limit=settings.get_workspace_limit(),
        benchmark_limit=settings.get_benchmark_limit(),
    )


def _show(tuned: Tuned, made: Outcome, store: Store, layout: str | None, as_json: bool) -> None:
    """Shows what was decided and what it gains; raises what the command ends with."""
    peaks = gpu_peaks.known(store.path.parent, store.environment)
    if as_json:
        head = {
            "path": str(store.path),
            "environment": store.environment.to_json(),
            "gain": tuned.gain.to_json(),
            "memory_format": layout,
        }
        decision_table.print_json(
            head, tuned, peaks, lambda decision: {"calls": tuned.calls.get(decision.problem, 0)}
        )
    elif tuned:
        timed = sum(decision.selection.total_samples > 0 for decision in tuned)
        how = f"{made.known} of them known already" if made.known else f"{timed} of them timed"
        title = f"{count(len(tuned), 'problem')}, {how}"
        decision_table.show(decision_table.console(), tuned, title, str(store.path), peaks)
        for line in filter(None, (layout, str(tuned))):
            say(line)
    if not store.is_writable:
        raise refuse("--store", f"{store.path} cannot be written to any more: not all is kept")
    if made.is_interrupted:
        click.echo(f"interrupted; {_kept(store)}", err=True)
        raise KeyboardInterrupt
    if made.failed:
        raise click.ClickException(
            f"{len(made.failed)} of {count(len(tuned) + len(made.failed), 'problem')} could not be "
            "tuned; PyTorch serves them"
        )
