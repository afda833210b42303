"""``cudnn-autotune report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cudnn_autotune.cli.commands import filters, sorting
from cudnn_autotune.cli.commands.output_file import check_new, force_option
from cudnn_autotune.cli.commands.store_option import nothing_there, open_store, store_option
from cudnn_autotune.cli.options import refuse
from cudnn_autotune.cli.report.wording import count
from cudnn_autotune.core import atomic_file

_SUFFIXES = (".html", ".htm")
# Some 10 KB each; a browser opens this many, and a person reads fewer.
_MOST = 2000


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.html")
@store_option
@filters.filter_options
@sorting.sort_option
@click.option(
    "--candidates",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Listed for each decision, beside those that tell why.",
)
@force_option
def report(out: Path, store_path: Path | None, candidates: int, force: bool, **given: Any) -> None:
    """Write one HTML page: what was chosen and why, with every interval, and what it gains.

    The page needs no network and no other file.
    """
    from cudnn_autotune.cli.report import page

    if out.suffix.lower() not in _SUFFIXES:
        raise refuse("FILE.html", f"must end in {' or '.join(_SUFFIXES)}, got {out}")
    check_new("FILE.html", out, force)
    wanted = filters.taken(given)
    found = open_store(store_path, wanted.may_pass)
    if found is None:
        raise refuse("--store", nothing_there(store_path))
    decisions = sorting.in_order(wanted.of(found.decisions), given["sort"])
    if not decisions:
        raise refuse("--store", f"{found.path}: {filters.none_of(found, wanted)}")
    if len(decisions) > _MOST:
        raise click.UsageError(
            f"{len(decisions)} decisions are more than the {_MOST} that a page may have; choose "
            "some by --op, --dtype, --engine, --contains or --sampling"
        )
    html = page.render(
        decisions,
        found.environment,
        source=found.path.name,
        selected=wanted.words,
        most_candidates=candidates,
    )
    data = html.encode()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(out, data)
    except OSError as error:
        raise refuse("FILE.html", f"cannot write {out}: {error.strerror or error}") from error
    click.echo(f"{count(len(decisions), 'decision')} -> {out} ({len(data) / 1024:.0f} KiB)")
