"""``cudnn-autotune diff``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import click

from cudnn_autotune.cli.filters import Filter, filter_options
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count, milliseconds
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tools.options import TOLERANCE, refuse

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
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def diff(
    ctx: click.Context, a: Path, b: Path, wanted: Filter, tolerance: float, as_json: bool
) -> None:
    """Tell how two stores (folders or files) differ; exit status 1 where they do, 2 where one of
    them cannot be read, or not all of it.

    '-' only in A, '+' only in B, '!' another engine, '~' the same engine and another time. Those
    of two environments can be compared, as before and after an update of cuDNN.
    """
    files = [_opened(path, name, wanted) for path, name in ((a, "A"), (b, "B"))]
    left, right = (list(wanted.of(file.decisions)) for file in files)
    found = list(differences(left, right, tolerance))
    alike = len(left) - sum(one.mark in "-!~" for one in found)
    if as_json:
        tree: dict[str, Any] = {
            name: {"path": str(file.path), "environment": file.environment.to_json()}
            for name, file in zip("ab", files, strict=True)
        }
        tree |= {"differences": [one.to_json() for one in found], "alike": alike}
        click.echo(json.dumps(tree, indent=1, allow_nan=False))
    else:
        for mark, name, file in zip("-+", "AB", files, strict=True):
            say(f"{mark * 3} {name}: {file.path}")
        for line in _between(files[0].environment, files[1].environment):
            say(line)
        for one in found:
            say(str(one))
        counts = Counter(one.mark for one in found)
        totals = ", ".join(f"{counts[mark]} {words}" for mark, words in _MARKS.items())
        click.echo(f"{totals}; {count(alike, 'decision')} alike")
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


class Difference(NamedTuple):
    """A problem whose decisions differ."""

    mark: str
    """The kind of the difference: a key of ``_MARKS``."""
    a: Decision | None
    b: Decision | None
    times: tuple[float, float] | None = None
    """Milliseconds in A and B by the same method, where the engine is the same."""

    @property
    def key(self) -> str:
        decision = self.a or self.b
        assert decision is not None
        return decision.key + (" deterministic" if decision.problem.deterministic else "")

    def __str__(self) -> str:
        text = " -> ".join(_described(one) for one in (self.a, self.b) if one is not None)
        if self.times is not None and self.a is not None:
            before, after = self.times
            change = f"{milliseconds(before)} -> {milliseconds(after)} ms"
            text = f"{self.a.candidate.text} {change} ({100 * (after / before - 1):+.1f} %)"
        return f"{self.mark} {self.key}: {text}"

    def to_json(self) -> dict[str, Any]:
        sides = {
            name: one
            and {"engine": one.candidate.text, "time_ms": one.chosen and one.chosen.reported_ms}
            for name, one in (("a", self.a), ("b", self.b))
        }
        return {"kind": _MARKS[self.mark], "key": self.key, **sides}


def differences(
    a: Iterable[Decision], b: Iterable[Decision], tolerance: float
) -> Iterator[Difference]:
    """Yields the differences in the order of ``a``, and then what only ``b`` has. Times differ if
    they do by more than ``tolerance``, relative to the one in ``a``."""
    left = {codec.name_of(decision): decision for decision in a}
    right = {codec.name_of(decision): decision for decision in b}
    for name, decision in left.items():
        other = right.pop(name, None)
        if other is None:
            yield Difference("-", decision, None)
        elif decision.candidate.text != other.candidate.text:
            yield Difference("!", decision, other)
        elif (times := _times(decision, other)) and abs(times[1] / times[0] - 1) > tolerance:
            yield Difference("~", decision, other, times)
    for decision in right.values():
        yield Difference("+", None, decision)


def _described(decision: Decision) -> str:
    chosen = decision.chosen
    ms = None if chosen is None else chosen.reported_ms
    return decision.candidate.text + ("" if ms is None else f" ({milliseconds(ms)} ms)")


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
