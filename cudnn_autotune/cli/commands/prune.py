"""``cudnn-autotune prune``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options
from cudnn_autotune.cli.stores import (
    StoreFile,
    files_of,
    kind_of,
    nothing,
    nothing_there,
    read,
    store_option,
)
from cudnn_autotune.cli.wording import say, warnings_held
from cudnn_autotune.core.display import count, printable
from cudnn_autotune.store import disk_file
from cudnn_autotune.store.decision import Decision, utc_text
from cudnn_autotune.store.environment import Environment, default_folder
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.store.private_folder import PrivateFolder, folder_beside
from cudnn_autotune.tools.options import AGE, refuse

_THIS, _OTHER, _ANY = "this", "other-than-this", "any"


@click.command()
@store_option
@click.option(
    "--older-than",
    "age",
    type=AGE,
    metavar="AGE",
    help="Only what was measured longer ago: 12h, 30d, 8w.",
)
@click.option(
    "--environment",
    type=click.Choice([_THIS, _OTHER, _ANY]),
    help="Only what holds for this machine as it is now, or for any other. [default: any]",
)
@filter_options
@click.option("--compiled-plans", is_flag=True, help="Remove all compiled plans beside it, too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(
    store_path: Path | None,
    age: timedelta | None,
    environment: str | None,
    wanted: Filter,
    compiled_plans: bool,
    yes: bool,
    dry_run: bool,
) -> None:
    """Remove decisions from a store: those that all of the given options are about.

    A file that is left without decisions is deleted.
    """
    names_decisions = age is not None or environment is not None or bool(wanted.words)
    if not names_decisions and not compiled_plans:
        raise click.UsageError(
            "say what is to go: --older-than, --environment, --contains, --op, --dtype, --engine, "
            "--sampling, --compiled-plans"
        )
    if store_path is not None and not kind_of(store_path):
        raise refuse("--store", f"{store_path} does not exist")
    if compiled_plans:
        _prune_plans(folder_beside(store_path or default_folder()), yes, dry_run)
    if not names_decisions:
        return
    files = files_of(store_path)
    if not files:
        click.echo(nothing_there(store_path))
        return
    here = Environment.of()
    before = None if age is None else utc_text(datetime.now(UTC) - age)
    going: list[tuple[StoreFile, list[Decision]]] = []
    for path in files:
        try:
            file = read(path, wanted.may_pass)
        except ValueError as error:
            say(f"left alone: {error}", err=True)
            continue
        if environment in (None, _ANY) or (environment == _THIS) == (file.environment == here):
            passing = [
                decision
                for decision in wanted.of(file.decisions)
                if before is None or decision.provenance.time < before
            ]
            if passing:
                going.append((file, passing))
                say(f"{file.path}: {len(passing)} of {count(file.count, 'decision')}")
    total = sum(len(decisions) for _, decisions in going)
    if not total:
        click.echo("nothing to remove")
        return
    if dry_run:
        click.echo(f"would remove {count(total, 'decision')}")
        return
    if not yes:
        click.confirm(f"Remove {count(total, 'decision')}?", abort=True)
    removed = sum(_removed(file, decisions) for file, decisions in going)
    click.echo(f"removed {count(removed, 'decision')}")
    if removed < total:
        click.echo(f"{count(total - removed, 'decision')} changed meanwhile, and stayed")


def _prune_plans(folder: PrivateFolder, yes: bool, dry_run: bool) -> None:
    files = folder.entries()
    total = f"{count(len(files), 'compiled plan')} from {printable(str(folder.path))}"
    if dry_run:
        click.echo(f"would remove {total}")
        return
    if files and not yes:
        click.confirm(f"Remove {total}?", abort=True)
    removed = sum(folder.remove(file.name) for file in files)
    click.echo(f"removed {count(removed, 'compiled plan')}")


def _removed(file: StoreFile, decisions: Sequence[Decision]) -> int:
    """Removes the decisions that are still in the file, and returns how many."""
    with warnings_held():
        store = Store(file.path, file.environment)
        removed = store.discard(decisions)
        if store.obstacle:
            raise refuse("--store", f"{file.path} cannot be written ({store.obstacle})")
    if len(store) == 0:
        # Another process may have written to the file meanwhile, or removed it.
        with suppress(OSError, ValueError), disk_file.locked(file.path):
            if not read(file.path, nothing).count:
                file.path.unlink()
    return removed
