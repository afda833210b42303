"""``cudnn-autotune show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cudnn_autotune.cli.far import farthest
from cudnn_autotune.cli.filters import Filter, filter_options, in_order, none_of, sort_option
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store, store_option
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count, printable
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.tools import gpu_peaks
from cudnn_autotune.tools.options import refuse
from cudnn_autotune.tuning import gain

_MOST_FAR = 20
_MOST_SHOWN = 500


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
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help=f"Show all. [default: the first {_MOST_SHOWN}]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Write JSON: all decisions, with every candidate."
)
@click.pass_context
def show(
    ctx: click.Context,
    store_path: Path | None,
    wanted: Filter,
    sort: str,
    most: int | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show what was chosen, and why: the decisions of a store.

    These are the decisions of this machine's environment, or of a folder's only file.
    """
    if most and ctx.get_parameter_source("sort") is not ParameterSource.DEFAULT:
        raise refuse("--sort", "not with --far, which has an order of its own")
    found = open_store(store_path, wanted.may_pass)
    if found is None:
        nowhere: dict[str, Any] = {"path": None, "environment": None, "decisions": []}
        click.echo(json.dumps(nowhere, indent=1) if as_json else nothing_there(store_path))
        return
    peaks = _peaks(found, is_needed=bool(most))
    passing = in_order(wanted.of(found.decisions), sort)
    distant = farthest(passing, peaks, most) if most else []
    from cudnn_autotune.cli import decision_table

    if as_json:
        head = {"path": str(found.path), "environment": found.environment.to_json()}
        shown = [one.decision for one in distant] if most else passing
        decision_table.print_json(head, shown, peaks)
        return
    if not (distant if most else passing):
        near = f"none of {count(len(passing), 'decision')} is known to be slower than its limit"
        say(f"{found.path}: {near if passing else none_of(found, wanted)}")
        return
    console, note, named = decision_table.console(), str(found.path), _named(found)
    if most:
        title = f"{named}: {len(distant):,} of {count(found.count, 'decision')}"
        title += ", farthest from the roofline"
        decision_table.show_farthest(console, distant, title, note)
        return
    shown = passing if show_all else passing[:_MOST_SHOWN]
    more = len(passing) - len(shown)
    for line in gain.lines(shown):
        say(line + (f" (of the {len(shown):,} shown)" if more else ""))
    title = f"{named}: {len(shown):,} of {count(found.count, 'decision')}"
    decision_table.show(console, shown, title, note, peaks)
    if more:
        say(
            f"and {more:,} more: --all shows them; --op, --dtype, --engine, --contains and "
            "--sampling choose some"
        )


def _peaks(found: StoreFile, is_needed: bool) -> Peaks | None:
    peaks_of = gpu_peaks.known_or_measured if is_needed else gpu_peaks.known
    peaks = peaks_of(found.path.parent, found.environment)
    if is_needed and peaks is None:
        gpu = printable(found.environment.gpu)
        raise click.ClickException(f"the peaks of {gpu} are unknown: {gpu_peaks.HOW}")
    return peaks


def _named(found: StoreFile) -> str:
    environment = found.environment
    mig = f" MIG {environment.mig_profile}" if environment.mig_profile else ""
    return (
        f"{environment.gpu}{mig}, cuDNN {environment.cudnn or 'none'}, "
        f"frontend {environment.cudnn_frontend or 'none'}"
    )
