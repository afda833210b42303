"""``cudnn-autotune diff``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options
from cudnn_autotune.cli.options import TOLERANCE, refuse
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store
from cudnn_autotune.cli.wording import count, milliseconds, say
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.store import Decision, Environment, codec

# The meaning of the first character of a difference's line.
_MARKS = {
    "-": "only in A",
    "+": "only in B",
    "!": "by another engine",
    "~": "of another time",
}


@click.command()
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@filter_options
@click.option(
    "--tolerance",
    type=TOLERANCE,
    default="0.03",
    show_default=True,
    metavar="SHARE",
    help="Times that differ by less, relatively, are alike.",
)
@click.pass_context
def diff(ctx: click.Context, a: Path, b: Path, wanted: Filter, tolerance: float) -> None:
    """Tell how two stores (folders or files) differ; exit status 1 where they do, 2 where one of
    them cannot be read, or not all of it.

    '-' only in A, '+' only in B, '!' another engine, '~' the same engine and another time. Those
    of two environments can be compared, as before and after an update of cuDNN.
    """
    files = [_opened(path, name, wanted) for path, name in ((a, "A"), (b, "B"))]
    left, right = (list(wanted.of(file.decisions)) for file in files)
    for mark, name, file in zip("-+", "AB", files, strict=True):
        say(f"{mark * 3} {name}: {file.path}")
    for line in _between(files[0].environment, files[1].environment):
        say(line)
    lines = list(differences(left, right, tolerance))
    for line in lines:
        say(line)
    counts = {mark: sum(line.startswith(mark) for line in lines) for mark in _MARKS}
    totals = ", ".join(f"{counts[mark]} {words}" for mark, words in _MARKS.items())
    alike = len(left) - sum(counts[mark] for mark in "-!~")
    click.echo(f"{totals}; {count(alike, 'decision')} alike")
    if any(file.complaints for file in files):
        ctx.exit(2)
    if lines:
        ctx.exit(1)


def _opened(path: Path, name: str, wanted: Filter) -> StoreFile:
    found = open_store(path, wanted.may_pass, option=name)
    if found is None:
        raise refuse(name, nothing_there(path))
    return found


def _between(a: Environment, b: Environment) -> Iterator[str]:
    for field in fields(Environment):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one != other:
            yield f"{field.name}: {one or 'none'} -> {other or 'none'}"


def differences(a: Iterable[Decision], b: Iterable[Decision], tolerance: float) -> Iterator[str]:
    """A line for each difference, in the order of ``a``, and then for what only ``b`` has. Times
    differ if they do by more than ``tolerance``, relative to the one in ``a``."""
    left = {codec.name_of(decision): decision for decision in a}
    right = {codec.name_of(decision): decision for decision in b}
    for name, decision in left.items():
        label, engine = _label(decision), _engine(decision)
        other = right.pop(name, None)
        if other is None:
            yield f"- {label}: {_told(decision)}"
        elif engine != _engine(other):
            yield f"! {label}: {_told(decision)} -> {_told(other)}"
        elif times := _times(decision, other):
            before, after = times
            if abs(after / before - 1) > tolerance:
                change = f"{milliseconds(before)} -> {milliseconds(after)} ms"
                yield f"~ {label}: {engine} {change} ({100 * (after / before - 1):+.1f} %)"
    for decision in right.values():
        yield f"+ {_label(decision)}: {_told(decision)}"


def _label(decision: Decision) -> str:
    return decision.key + (" deterministic" if decision.problem.deterministic else "")


def _engine(decision: Decision) -> str:
    return decision.chosen.candidate.text if decision.chosen else ATEN.text


def _told(decision: Decision) -> str:
    chosen = decision.chosen
    ms = None if chosen is None else chosen.reported_ms
    return _engine(decision) + ("" if ms is None else f" ({milliseconds(ms)} ms)")


def _times(a: Decision, b: Decision) -> tuple[float, float] | None:
    """The times of two decisions by the same method: of sustained runs if both have them, else of
    batches."""
    one, other = a.chosen, b.chosen
    if one is None or other is None:
        return None
    if one.sustained_ms and other.sustained_ms:
        return one.sustained_ms, other.sustained_ms
    if one.time_ms and other.time_ms:
        return one.time_ms, other.time_ms
    return None
