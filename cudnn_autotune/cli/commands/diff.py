"""``cudnn-autotune diff``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import click

from cudnn_autotune.cli.filters import Filter, filter_options
from cudnn_autotune.cli.options import TOLERANCE, refuse
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store
from cudnn_autotune.cli.terminal import say
from cudnn_autotune.cli.wording import count, milliseconds
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.store import Decision, Environment, entry

_KINDS = {
    "only_a": "only in A",
    "only_b": "only in B",
    "engine": "by another engine",
    "time": "of another time",
}


@dataclass(frozen=True)
class Difference:
    kind: str
    """A key of ``_KINDS``."""
    line: str


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
    """How two stores (folders or files) differ; exit status 1 where they do, 2 where one of them
    cannot be read, or not all of it.

    '-' only in A, '+' only in B, '!' another engine, '~' the same engine and another time. Those
    of two environments can be compared, as before and after an update of cuDNN.
    """
    files = [_opened(path, name, wanted) for path, name in ((a, "A"), (b, "B"))]
    left, right = (wanted.of(file.decisions) for file in files)
    for mark, name, file in zip("-+", "AB", files, strict=True):
        say(f"{mark * 3} {name}: {file.path}")
    for line in _between(files[0].environment, files[1].environment):
        say(line)
    found = list(differences(left, right, tolerance))
    for difference in found:
        say(difference.line)
    told = [f"{sum(d.kind == kind for d in found)} {words}" for kind, words in _KINDS.items()]
    common = {entry.name_of(d) for d in left} & {entry.name_of(d) for d in right}
    alike = len(common) - sum(d.kind in ("engine", "time") for d in found)
    click.echo(f"{', '.join(told)}; {count(alike, 'decision')} alike")
    if any(file.complaints for file in files):
        ctx.exit(2)
    if found:
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


def differences(
    a: Iterable[Decision], b: Iterable[Decision], tolerance: float
) -> Iterator[Difference]:
    """The differences in the order of ``a``, and then what only ``b`` has.

    Args:
        tolerance: how much a time may differ, relative to the one in ``a``.
    """
    left = {entry.name_of(decision): decision for decision in a}
    right = {entry.name_of(decision): decision for decision in b}
    for name, decision in left.items():
        label = _label(decision)
        if name not in right:
            yield Difference("only_a", f"- {label}: {_told(decision)}")
            continue
        other = right[name]
        if _engine(decision) != _engine(other):
            yield Difference("engine", f"! {label}: {_told(decision)} -> {_told(other)}")
            continue
        times = _times(decision, other)
        if times and abs(times[1] / times[0] - 1) > tolerance:
            before, after = map(milliseconds, times)
            change = 100 * (times[1] / times[0] - 1)
            yield Difference(
                "time", f"~ {label}: {_engine(decision)} {before} -> {after} ms ({change:+.1f} %)"
            )
    for name, decision in right.items():
        if name not in left:
            yield Difference("only_b", f"+ {_label(decision)}: {_told(decision)}")


def _label(decision: Decision) -> str:
    return decision.key + (" deterministic" if decision.problem.deterministic else "")


def _engine(decision: Decision) -> str:
    return decision.chosen.candidate.text if decision.chosen else ATEN.text


def _told(decision: Decision) -> str:
    chosen = decision.chosen
    ms = None if chosen is None else chosen.reported_ms
    return _engine(decision) + ("" if ms is None else f" ({milliseconds(ms)} ms)")


def _times(a: Decision, b: Decision) -> tuple[float, float] | None:
    """Two times measured in one way: of sustained runs if both have them, else of batches."""
    one, other = a.chosen, b.chosen
    if one is None or other is None:
        return None
    if one.sustained_ms and other.sustained_ms:
        return one.sustained_ms, other.sustained_ms
    if one.time_ms and other.time_ms:
        return one.time_ms, other.time_ms
    return None
