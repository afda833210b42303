"""``cudnn-autotune show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.cli.commands import filters, sorting
from cudnn_autotune.cli.commands.filters import none_of
from cudnn_autotune.cli.commands.output import say
from cudnn_autotune.cli.commands.store_option import (
    StoreFile,
    files_of,
    nothing,
    nothing_there,
    open_store,
    read,
    store_option,
)
from cudnn_autotune.cli.report.wording import count


@click.command()
@store_option
@filters.filter_options
@sorting.sort_option
@click.option("--json", "as_json", is_flag=True, help="For programs: whole, with every candidate.")
@click.option("--files", "list_files", is_flag=True, help="List which files are there.")
def show(store_path: Path | None, as_json: bool, list_files: bool, **given: Any) -> None:
    """What was chosen, and why: the decisions of a store.

    Those of this machine's environment; of a folder that has one file only, that one's.
    """
    if list_files:
        _list(store_path, as_json)
        return
    wanted = filters.taken(given)
    found = open_store(store_path, wanted.may_pass)
    decisions = wanted.of(found.decisions) if found else []
    decisions = sorting.in_order(decisions, given["sort"])
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
    from cudnn_autotune.cli.commands import decision_table

    shown = f"{len(decisions)} of {count(found.count, 'decision')}"
    title = f"{_named(found)}: {shown}"
    decision_table.show(decision_table.console(), decisions, title, note=str(found.path))


def _list(store_path: Path | None, as_json: bool) -> None:
    files = files_of(store_path)
    if not files and not as_json:
        click.echo(nothing_there(store_path))
    trees: list[dict[str, Any]] = []
    for path in files:
        tree: dict[str, Any] = {"path": str(path)}
        try:
            found = read(path, nothing)
        except ValueError as error:
            tree["not readable"] = [str(error)]
            line = str(error)
        else:
            kept = f"{count(found.count, 'decision')}, {found.size / 1024:.0f} KiB"
            line = "; ".join([f"{path}: {_named(found)}: {kept}", *found.complaints])
            tree |= {
                "environment": found.environment.to_json(),
                "decisions": found.count,
                "bytes": found.size,
            }
            if found.complaints:
                tree["not readable"] = list(found.complaints)
        trees.append(tree)
        if not as_json:
            say(line)
    if as_json:
        click.echo(json.dumps(trees, indent=1))


def _named(found: StoreFile) -> str:
    environment = found.environment
    mig = f" MIG {environment.mig_profile}" if environment.mig_profile else ""
    return (
        f"{environment.gpu}{mig}, cuDNN {environment.cudnn or 'none'}, "
        f"frontend {environment.cudnn_frontend or 'none'}"
    )
