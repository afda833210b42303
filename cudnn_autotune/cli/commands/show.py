"""``cudnn-autotune show``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options, in_order, none_of, sort_option
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store, store_option
from cudnn_autotune.cli.terminal import say
from cudnn_autotune.cli.wording import count


@click.command()
@store_option
@filter_options
@sort_option
@click.option("--json", "as_json", is_flag=True, help="For programs: whole, with every candidate.")
def show(store_path: Path | None, wanted: Filter, sort: str, as_json: bool) -> None:
    """What was chosen, and why: the decisions of a store.

    Those of this machine's environment; of a folder that has one file only, that one's.
    """
    found = open_store(store_path, wanted.may_pass)
    decisions = wanted.of(found.decisions) if found else []
    decisions = in_order(decisions, sort)
    if as_json:
        tree = {
            "path": str(found.path) if found else None,
            "environment": found.environment.to_json() if found else None,
            "decisions": [{"key": d.key, **d.to_json()} for d in decisions],
        }
        click.echo(json.dumps(tree, indent=1, allow_nan=False))
        return
    if found is None:
        click.echo(nothing_there(store_path))
        return
    if not decisions:
        say(f"{found.path}: {none_of(found, wanted)}")
        return
    from cudnn_autotune.cli import decision_table

    shown = f"{len(decisions)} of {count(found.count, 'decision')}"
    title = f"{_named(found)}: {shown}"
    decision_table.show(decision_table.console(), decisions, title, note=str(found.path))


def _named(found: StoreFile) -> str:
    environment = found.environment
    mig = f" MIG {environment.mig_profile}" if environment.mig_profile else ""
    return (
        f"{environment.gpu}{mig}, cuDNN {environment.cudnn or 'none'}, "
        f"frontend {environment.cudnn_frontend or 'none'}"
    )
