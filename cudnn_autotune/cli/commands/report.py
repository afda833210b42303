"""``cudnn-autotune report``."""

from __future__ import annotations

from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options, in_order, passing, sort_option
from cudnn_autotune.cli.stores import store_option
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count
from cudnn_autotune.tools import gpu_peaks
from cudnn_autotune.tools.options import FILE, check_output, force_option, refuse, write
from cudnn_autotune.tuning import gain

_SUFFIXES = (".html", ".htm")
# Some 10 KB each; a browser opens this many, and a person reads fewer.
_MOST = 2000


@click.command()
@click.argument("out", type=FILE, metavar="FILE.html")
@store_option
@filter_options
@sort_option
@force_option
def report(out: Path, store_path: Path | None, wanted: Filter, sort: str, force: bool) -> None:
    """Write one HTML page: what was chosen and why, with every interval, and what it gains.

    The page needs no network and no other file.
    """
    from cudnn_autotune.cli.report import page

    if out.suffix.lower() not in _SUFFIXES:
        raise refuse("FILE.html", f"must end in {' or '.join(_SUFFIXES)}, got {out}")
    check_output("FILE.html", out, force)
    found, shown = passing(store_path, wanted)
    if len(shown) > _MOST:
        raise click.UsageError(
            f"{len(shown)} decisions are more than the {_MOST} that a page may have; choose "
            "some by --op, --dtype, --engine, --contains or --sampling"
        )
    html = page.render(
        in_order(shown, sort),
        found.environment,
        source=found.path.name,
        selected=wanted.words,
        peaks=gpu_peaks.known_or_measured(found.path.parent, found.environment),
    )
    data = html.encode()
    write("FILE.html", out, data)
    for line in gain.lines(shown):
        say(line)
    say(f"{count(len(shown), 'decision')} -> {out} ({len(data) / 1024:.0f} KiB)")
