"""Which decisions of a store a command is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import click

from cudnn_autotune.cli.commands.store_option import StoreFile
from cudnn_autotune.cli.report.wording import count
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.problem import DTYPES, OPERATIONS
from cudnn_autotune.store.decision import Decision

_NAMES = ("op", "dtype", "engine", "contains", "sampling")


@dataclass(frozen=True)
class Filter:
    """A decision passes that has one of each kind that is given, and all of ``contains``."""

    op: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    """Of what was chosen: a number, or a text without or with knobs."""
    contains: tuple[str, ...] = ()
    """In the decision's key, in whatever case."""
    sampling: tuple[str, ...] = ()

    def may_pass(self, key: str) -> bool:
        """By the key alone: all but ``engine``, which is not in it."""
        described, _, measured_by = key.partition(" sampling=")
        words = described.split()
        return (
            (not self.op or any(op in words[:1] for op in self.op))
            and (not self.dtype or any(dtype in words for dtype in self.dtype))
            and (not self.sampling or measured_by in self.sampling)
            and all(text.lower() in key.lower() for text in self.contains)
        )

    def passes(self, decision: Decision) -> bool:
        by_engine = not self.engine or any(_is_by(decision, engine) for engine in self.engine)
        return by_engine and self.may_pass(decision.key)

    def of(self, decisions: Iterable[Decision]) -> list[Decision]:
        return [decision for decision in decisions if self.passes(decision)]

    @property
    def words(self) -> str:
        """``op dgrad or wgrad, engine 67``; empty where all pass."""
        given = ((name, getattr(self, name)) for name in _NAMES)
        return ", ".join(
            f"{name} {(' and ' if name == 'contains' else ' or ').join(texts)}"
            for name, texts in given
            if texts
        )


def _is_by(decision: Decision, engine: str) -> bool:
    chosen = decision.chosen
    if chosen is None:
        return engine == ATEN.text
    if engine.isdecimal():
        return chosen.candidate.engine == int(engine)
    text = chosen.candidate.text
    return text == engine or text.startswith(f"{engine}:")


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--op``, ``--dtype``, ``--engine``, ``--contains``, ``--sampling``: see :func:`taken`."""
    for option in reversed(
        (
            click.option(
                "--op", multiple=True, type=click.Choice(OPERATIONS), help="Only of this."
            ),
            click.option(
                "--dtype",
                multiple=True,
                type=click.Choice(list(DTYPES.values())),
                help="Only of this type.",
            ),
            click.option(
                "--engine",
                multiple=True,
                callback=_texts,
                metavar="ENGINE",
                help="Only by this engine: 67, eng67:KERNEL_CFG=1, aten, matmul.",
            ),
            click.option(
                "--contains",
                multiple=True,
                callback=_texts,
                metavar="TEXT",
                help="Only with this in the problem's text, as x=64x256x14x14.",
            ),
            click.option(
                "--sampling",
                multiple=True,
                callback=_texts,
                metavar="MODE",
                help="Only measured by this mode.",
            ),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> Filter:
    """The filter that :func:`filter_options` have put into a command's arguments."""
    return Filter(**{name: tuple(given[name]) for name in _NAMES})


def _texts(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(text.strip() for text in value):
        raise click.BadParameter("must not be empty")
    return tuple(text.strip() for text in value)


def none_of(found: StoreFile, wanted: Filter) -> str:
    """What is said of a file where nothing passes."""
    if not found.count or not wanted.words:
        return "it holds no decisions that can be read"
    return f"none of its {count(found.count, 'decision')} has {wanted.words}"
