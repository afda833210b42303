"""``cudnn-autotune export`` and ``import``: decisions in files that ship."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options, passing
from cudnn_autotune.cli.stores import StoreFile, kind_of, read, read_whole, store_option
from cudnn_autotune.cli.wording import say, warnings_held
from cudnn_autotune.core.display import count
from cudnn_autotune.store import codec, file_format, verdicts
from cudnn_autotune.store.environment import SUFFIX, Environment, names_file
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.tools.options import FILE, check_output, force_option, refuse, refusing, write


@click.command()
@click.argument("out", type=FILE, metavar="FILE")
@store_option
@filter_options
@force_option
def export(out: Path, store_path: Path | None, wanted: Filter, force: bool) -> None:
    """Write decisions into FILE (.json), to ship them with an application.

    A file is of one environment: import and cudnn_autotune.set_store(shipped=[FILE]) take it. If
    all decisions are written, so is what else was measured (norms, fused groups, layouts), into a
    file beside it (.norms).
    """
    if out.suffix != SUFFIX:
        raise refuse("FILE", f"must end in {SUFFIX}, got {out}")
    found, decisions = passing(store_path, wanted)
    if kind_of(out, "FILE") and os.path.samefile(out, found.path):
        raise refuse("FILE", f"{out} is there already; it is the store itself")
    check_output("FILE", out, force)
    check_output("FILE", beside := verdicts.path_of(out), force)
    with refusing("FILE"):
        norms = None if wanted.words else _norms_beside(found.path)
    lines = sorted(codec.encode(decision, found.environment) for decision in decisions)
    write("FILE", out, file_format.encode(found.environment, lines))
    say(
        f"{count(len(lines), 'decision')} of {found.environment.file_name.removesuffix(SUFFIX)}"
        f" -> {out} ({out.stat().st_size / 1024:.0f} KiB)"
    )
    if norms is None:
        with suppress(OSError):  # there may be none to replace
            beside.unlink()
        return
    write("FILE", beside, file_format.encode(norms.environment, sorted(norms.lines.values())))
    say(f"{count(norms.count, 'verdict')} -> {beside}")


@click.command("import")
@click.argument(
    "paths",
    type=click.Path(path_type=Path),
    metavar="FILE...",
    nargs=-1,
    required=True,
)
@store_option
def import_(paths: tuple[Path, ...], store_path: Path | None) -> None:
    """Take over the decisions of FILEs into the store.

    The later one of two for a problem stays, unless the earlier one was measured under looser
    constraints. Decisions of another environment go into that environment's own file. What else
    was measured, in a file beside FILE (.norms), is added where there is none. All FILEs are read
    before anything is written; one that is damaged is refused.
    """
    files: list[tuple[StoreFile, StoreFile | None]] = []
    for path in paths:
        with refusing("FILE..."):
            file = read_whole(path)
            files.append((file, norms := _norms_beside(path)))
            if norms is not None and norms.environment != file.environment:
                raise ValueError(f"{norms.path}: it is of another environment than {path}")
    is_one_file = store_path is not None and names_file(store_path)
    if is_one_file and len({file.environment for file, _ in files}) > 1:
        raise refuse("--store", "a file holds one environment; name a folder")
    here = Environment.of()
    for file, norms in files:
        decisions = list(file.decisions)
        with warnings_held():
            store = Store(store_path, file.environment)
            taken = store.add(decisions)
            if store.obstacle:
                raise _not_written(store.path, store.obstacle, file.path)
        foreign = "" if file.environment == here else ", foreign: of another environment than this"
        older = len(decisions) - taken.new - taken.replaced
        say(
            f"{file.path}: {count(len(decisions), 'decision')}{foreign}: {taken.new} new, "
            f"{taken.replaced} newer, {older} not newer than what is there"
        )
        say(f"  -> {store.path}")
        if norms is not None:
            with warnings_held():
                beside = verdicts.VerdictFile(store, read_only=False)
                added = beside.add(norms.lines)
                if added is None:
                    place = verdicts.path_of(store.path)
                    raise _not_written(place, beside.obstacle, norms.path)
            say(f"{norms.path}: {count(norms.count, 'verdict')}: {added} new")


def _not_written(place: Path, why: str, given: Path) -> click.BadParameter:
    return refuse(
        "--store",
        f"{place} cannot be written ({why}), and nothing of {given} is taken over; "
        "name another place by --store",
    )


def _norms_beside(path: Path) -> StoreFile | None:
    """Reads the verdicts beside a store's file; None if there are none. Raises
    ValueError if anything in them cannot be read."""
    beside = verdicts.path_of(path)
    if not kind_of(beside, "FILE"):
        return None
    found = read(beside)
    if found.complaints:
        raise ValueError(f"{beside}: {'; '.join(found.complaints)}")
    return found if found.count else None
