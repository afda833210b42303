"""``cudnn-autotune prune``."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.command_options import read_by, refuse
from cudnn_autotune.commands import filters
from cudnn_autotune.commands.store_option import (
    StoreFile,
    files_of,
    nothing,
    nothing_there,
    read,
    store_option,
)
from cudnn_autotune.report.wording import count
from cudnn_autotune.store import Environment, Store, disk_file

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_THIS, _OTHER, _ANY = "this", "other-than-this", "any"


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})\s*([hdw])", text.strip())
    if match is None:
        raise ValueError
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


@click.command()
@store_option
@click.option(
    "--older-than",
    "age",
    callback=read_by(_age, "a number of hours, days or weeks, as 12h, 30d or 8w"),
    metavar="AGE",
    help="Only what was measured longer ago: 12h, 30d, 8w.",
)
@click.option(
    "--environment",
    type=click.Choice([_THIS, _OTHER, _ANY]),
    help="Only what holds for this machine as it is now, or for any other. [default: any]",
)
@filters.filter_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
def prune(
    store_path: Path | None,
    age: timedelta | None,
    environment: str | None,
    yes: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Remove decisions from a store: those that all of the given options are about.

    A file with nothing left in it is deleted.
    """
    wanted = filters.taken(given)
    if age is None and environment is None and not wanted.words:
        raise click.UsageError(
            "say what is to go: --older-than, --environment, --contains, --op, --dtype, --engine, "
            "--sampling"
        )
    if store_path is not None and not store_path.exists():
        raise refuse("--store", f"{store_path} does not exist")
    files = files_of(store_path)
    if not files:
        click.echo(nothing_there(store_path))
        return
    here = Environment.of()
    now = datetime.now(UTC)
    going: list[tuple[StoreFile, list[str]]] = []
    for path in files:
        try:
            file = read(path, wanted.may_pass)
        except ValueError as error:
            click.echo(f"left alone: {error}", err=True)
            continue
        if environment in (None, _ANY) or (environment == _THIS) == (file.environment == here):
            going.append((file, _keys(file, wanted, None if age is None else now - age)))
    total = sum(len(keys) for _, keys in going)
    for file, keys in going:
        if keys:
            click.echo(f"{file.path}: {len(keys)} of {count(file.count, 'decision')}")
    if not total:
        click.echo("nothing to remove")
        return
    if dry_run:
        click.echo(f"would remove {count(total, 'decision')}")
        return
    if not yes:
        click.confirm(f"Remove {count(total, 'decision')}?", abort=True)
    for file, keys in going:
        if keys:
            _remove(file, keys)
    click.echo(f"removed {count(total, 'decision')}")


def _keys(file: StoreFile, wanted: filters.Filter, before: datetime | None) -> list[str]:
    """Of one key, what was measured with and without determinism goes together or stays."""
    matches: dict[str, bool] = {}
    for decision in file.decisions:
        is_old = before is None or datetime.fromisoformat(decision.provenance.time) < before
        passes = is_old and wanted.passes(decision)
        matches[decision.key] = matches.get(decision.key, True) and passes
    return [key for key, match in matches.items() if match]


def _remove(file: StoreFile, keys: list[str]) -> None:
    store = Store(file.path, file.environment)
    store.remove(keys)
    if not store.is_writable:
        raise refuse("--store", f"{file.path} cannot be written to")
    if len(store) == 0:
        with suppress(OSError), disk_file.locked(file.path):
            # Another process may have written meanwhile.
            if not read(file.path, nothing).count:
                file.path.unlink()
