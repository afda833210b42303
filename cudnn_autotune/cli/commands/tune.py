"""``cudnn-autotune tune``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune import sampling
from cudnn_autotune.cli import options
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.options import refuse
from cudnn_autotune.cli.stores import store_option
from cudnn_autotune.cli.wording import count
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn.model_problems import problems_of
from cudnn_autotune.sampling.online import Online
from cudnn_autotune.store import Decision, Environment, Store
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.tuning import remembering, settings

_OF_LAYERS = ("weight", "op", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class Bench:
    """What tuning runs on. A program that invokes the command may hand on one of its own, as the
    context's object; else it is the GPU."""

    environment: Environment
    device: torch.device
    tune: Callable[[ConvProblem, str], Decision]
    """Decides on a problem in a sampling mode, by measuring it."""
    problems_of: Callable[..., list[ConvProblem]]
    """``problems_of(model, *inputs)``."""


@click.command()
@click.argument("model", required=False)
@click.option(
    "--input",
    multiple=True,
    required=True,
    type=options.SIZES,
    metavar="N,C,H,W",
    help="The input's shape; several times for a model that takes several.",
)
@options.shape_options
@click.option(
    "--train/--inference",
    default=None,
    help="Of a model: forward and backward, or forward only. [default: inference]",
)
@click.option("--sampling", "mode", help="The sampling mode. [default: the one in force]")
@click.option("--budget-ms", type=options.POSITIVE, metavar="MS", help="For each choice.")
@click.option("--retune", is_flag=True, help="Also what the store knows.")
@click.option("--device", type=click.IntRange(0), metavar="N", help="CUDA device.")
@store_option
@click.pass_context
def tune(ctx: click.Context, /, model: str | None, store_path: Path | None, **given: Any) -> None:
    """Tune a layer, or every Conv2d of a model, into the store.

    A layer by --input and --weight; else MODEL: torchvision:resnet50, timm:NAME, or MODULE:CALLABLE
    for one of your own (a module found from here, and what in it makes the model). What the store
    knows is not tuned again. Needs a GPU.
    """
    mode = _mode(given["mode"])
    if model is None:
        if given["weight"] is None:
            raise refuse("--weight", "is needed for a layer; a model is named as MODEL")
        if len(given["input"]) > 1:
            raise refuse("--input", "once for a layer")
        if given["train"] is not None:
            raise refuse("--train/--inference", "only with a MODEL; for a layer there is --op")
    else:
        tune_problems.only_of_layers(given, _OF_LAYERS)
    given["train"] = bool(given["train"])
    # Before a GPU is asked for: what is wrong with a layer can be said anywhere.
    problems = [] if model is not None else tune_problems.of_layer(given)
    with _bench(ctx, given, store_path) as bench:
        if model is not None:
            problems = tune_problems.of_model(model, given, bench.device, bench.problems_of)
            if not problems:
                click.echo(f"{model} has no convolution to tune")
                return
        budget_ms = given["budget_ms"] or settings.get_budget_ms()
        with settings.use_sampling(mode, budget_ms=budget_ms):
            _run(problems, bench, mode, store_path, given["retune"])


def _mode(given: str | None) -> str:
    mode = settings.get_sampling() if given is None else given
    if mode not in sampling.names():
        raise refuse("--sampling", f"{mode!r} is not one of {', '.join(sampling.names())}")
    if isinstance(sampling.get(mode), Online):
        raise refuse("--sampling", f"{mode!r} decides in a program's own calls, not beforehand")
    return mode


@contextmanager
def _bench(ctx: click.Context, given: dict[str, Any], store_path: Path | None) -> Iterator[Bench]:
    if isinstance(ctx.obj, Bench):
        yield ctx.obj
        return
    if not extension_available() or not torch.cuda.is_available():
        why = "there is no CUDA GPU here" if extension_available() else "this torch has no CUDA"
        raise click.UsageError(
            f"tuning needs a GPU, and {why}; without one: `import` decisions that were tuned "
            "elsewhere, `show --store FILE` and `report` what is in them, `audit --simulate` and "
            "`demo` to see the sampling modes at work"
        )
    index = torch.cuda.current_device() if given["device"] is None else given["device"]
    if index >= torch.cuda.device_count():
        raise refuse("--device", f"there are {torch.cuda.device_count()} CUDA devices")
    before = store_settings.get_store_settings()
    # This command looks and writes itself; the store helps with what was chosen for problems like
    # the new one.
    store_settings.set_store(store_path, mode="read")
    try:
        with torch.cuda.device(index):
            yield Bench(
                Environment.of(index),
                torch.device("cuda", index),
                lambda problem, mode: remembering.tune(problem, index, mode, anew=True),
                problems_of,
            )
    finally:
        store_settings.restore_settings(before)


def _run(
    problems: list[ConvProblem], bench: Bench, mode: str, store_path: Path | None, retune: bool
) -> None:
    from cudnn_autotune.cli import decision_table
    from cudnn_autotune.cli.commands import tune_run

    store = Store(store_path, bench.environment)
    if not store.is_writable:
        raise refuse("--store", f"{store.path} cannot be written to")

    def known(problem: ConvProblem) -> Decision | None:
        if retune:
            return None
        found = store.find(
            problem,
            sampling=mode,
            workspace_limit=settings.get_workspace_limit(),
            benchmark_limit=settings.get_benchmark_limit(),
        )
        return None if found is None or _was_cut_short(found) else found

    console = decision_table.console()
    try:
        outcome = tune_run.run(
            problems, lambda problem: bench.tune(problem, mode), store, known, console
        )
    except tune_run.DeviceLost as error:
        kept = f"what was decided before is kept in {store.path}"
        raise click.ClickException(f"the GPU fails; {kept}: {error}") from error
    if not store.is_writable:
        raise refuse("--store", f"{store.path} cannot be written to any more: not all is kept")
    if outcome.decisions:
        title = f"{count(len(problems), 'problem')}, {outcome.known} of them known already"
        decision_table.show(console, outcome.decisions, title, note=str(store.path))
    if outcome.failed:
        raise click.ClickException(
            f"{len(outcome.failed)} of {count(len(problems), 'problem')} could not be tuned; "
            "PyTorch serves them"
        )


def _was_cut_short(decision: Decision) -> bool:
    """Whether a budget left something out of it, and more is allowed now."""
    was_ms, budget_ms = decision.selection.evidence.budget_ms, settings.get_budget_ms()
    return was_ms is not None and (budget_ms is None or budget_ms > was_ms)
