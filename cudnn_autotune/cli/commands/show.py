"""``cudnn-autotune show``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cudnn_autotune.cli import gpu_peaks
from cudnn_autotune.cli.farthest import farthest
from cudnn_autotune.cli.filters import Filter, filter_options, in_order, none_of, sort_option
from cudnn_autotune.cli.options import refuse
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store, store_option
from cudnn_autotune.cli.terminal import say
from cudnn_autotune.cli.wording import count, printable
from cudnn_autotune.engines.roofline import Peaks, limit
from cudnn_autotune.store import Decision

_MOST_FAR = 20


@click.command()
@store_option
@filter_options
@sort_option
@click.option(
    "--far",
    "most",
    type=click.IntRange(1),
    is_flag=False,
    flag_value=_MOST_FAR,
    metavar="[N]",
    help="The N farthest from the roofline, by the time that could be won. "
    f"[default without N: {_MOST_FAR}]",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: whole, with every candidate.")
@click.pass_context
def show(
    ctx: click.Context,
    store_path: Path | None,
    wanted: Filter,
    sort: str,
    most: int | None,
    as_json: bool,
) -> None:
    """What was chosen, and why: the decisions of a store.

    Those of this machine's environment; of a folder that has one file only, that one's.
    """
    if most and ctx.get_parameter_source("sort") is not ParameterSource.DEFAULT:
        raise refuse("--sort", "not with --far, which has an order of its own")
    found = open_store(store_path, wanted.may_pass)
    passing = wanted.of(found.decisions) if found else []
    peaks = _peaks(found, is_needed=bool(most)) if found else None
    distant = farthest(passing, peaks, most) if most else []
    decisions = [one.decision for one in distant] if most else in_order(passing, sort)
    if as_json:
        tree = {
            "path": str(found.path) if found else None,
            "environment": found.environment.to_json() if found else None,
            "decisions": [{"key": d.key, **_limit(d, peaks), **d.to_json()} for d in decisions],
        }
        click.echo(json.dumps(tree, indent=1, allow_nan=False))
        return
    if found is None:
        click.echo(nothing_there(store_path))
        return
    if not decisions:
        near = f"none of {count(len(passing), 'decision')} is known to be slower than its limit"
        say(f"{found.path}: {near if passing else none_of(found, wanted)}")
        return
    from cudnn_autotune.cli import decision_table

    shown = f"{len(decisions)} of {count(found.count, 'decision')}"
    title = f"{_named(found)}: {shown}"
    console, note = decision_table.console(), str(found.path)
    if most:
        title += ", farthest from the roofline"
        decision_table.show_farthest(console, distant, title, note)
    else:
        decision_table.show(console, decisions, title, note, peaks)


def _peaks(found: StoreFile, is_needed: bool) -> Peaks | None:
    peaks_of = gpu_peaks.known_or_measured if is_needed else gpu_peaks.known
    peaks = peaks_of(found.path.parent, found.environment)
    if is_needed and peaks is None:
        gpu = printable(found.environment.gpu)
        raise click.ClickException(f"the peaks of {gpu} are unknown: {gpu_peaks.HOW}")
    return peaks


def _limit(decision: Decision, peaks: Peaks | None) -> dict[str, Any]:
    """The limit as plain JSON; nothing where the peaks are not known."""
    return {} if peaks is None else {"limit": asdict(limit(decision.problem, peaks))}


def _named(found: StoreFile) -> str:
    environment = found.environment
    mig = f" MIG {environment.mig_profile}" if environment.mig_profile else ""
    return (
        f"{environment.gpu}{mig}, cuDNN {environment.cudnn or 'none'}, "
        f"frontend {environment.cudnn_frontend or 'none'}"
    )
