"""Filters and sorts the decisions of a store for a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from cudnn_autotune import sampling
from cudnn_autotune.cli.stores import StoreFile, nothing_there, open_store
from cudnn_autotune.core.display import count
from cudnn_autotune.engines.candidate_id import canonical
from cudnn_autotune.engines.problem import DTYPES, OPERATIONS
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tools.options import WORD, group, refuse

_PROBLEM = "problem"


@dataclass(frozen=True)
class Filter:
    """Passes decisions that have one of each kind of value given, and all of ``contains``."""

    op: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    """Chosen engines: a number, or a text with or without knobs; or an implementation's name."""
    contains: tuple[str, ...] = ()
    """Texts in the decision's key, in upper or lower case."""
    sampling: tuple[str, ...] = ()

    def may_pass(self, key: str) -> bool:
        """Whether a decision with this key passes all but ``engine``, which is not in the key."""
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

    def of(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """The decisions that pass, in the same order."""
        return filter(self.passes, decisions)

    @property
    def words(self) -> str:
        """The filter in words, as ``op dgrad or wgrad, engine 67``; empty if all pass."""
        given = {field.name: " or ".join(getattr(self, field.name)) for field in fields(self)}
        given["text"] = " and ".join(self.contains)
        del given["contains"]
        return ", ".join(f"{name} {texts}" for name, texts in given.items() if texts)


def _is_by(decision: Decision, engine: str) -> bool:
    if engine.isdecimal():
        return decision.candidate.engine == int(engine)
    text, engine = decision.candidate.text, canonical(engine)
    return text == engine or text.startswith((f"{engine}:", f"{engine}@"))


def _known_modes(
    ctx: click.Context, param: click.Parameter, modes: tuple[str, ...]
) -> tuple[str, ...]:
    for mode in modes:
        if mode not in sampling.names():
            raise click.BadParameter(
                f"{mode!r} is not one of {', '.join(sampling.names())}; decisions of a mode that a "
                f"program has registered: --contains sampling={mode}"
            )
    return modes


_options = group(
    click.option("--op", multiple=True, type=click.Choice(OPERATIONS), help="Only this operation."),
    click.option(
        "--dtype",
        multiple=True,
        type=click.Choice(list(DTYPES.values())),
        help="Only this dtype.",
    ),
    click.option(
        "--engine",
        multiple=True,
        type=WORD,
        metavar="ENGINE",
        help="Only this engine: 67, eng67:KERNEL_CFG=1, aten, matmul, an implementation's name.",
    ),
    click.option(
        "--contains",
        multiple=True,
        type=WORD,
        metavar="TEXT",
        help="Only problems with TEXT in their text, such as x=64x256x14x14.",
    ),
    click.option(
        "--sampling",
        multiple=True,
        type=WORD,
        callback=_known_modes,
        metavar="MODE",
        help="Only what this mode measured.",
    ),
)


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a :class:`Filter`; the command gets it as its argument ``wanted``."""

    @functools.wraps(command)
    def with_filter(*args: Any, **given: Any) -> Any:
        texts = {field.name: given.pop(field.name) for field in fields(Filter)}
        return command(*args, wanted=Filter(**texts), **given)

    return _options(with_filter)


def none_of(found: StoreFile, wanted: Filter) -> str:
    """The message for a file of which no decision passes."""
    if not found.count or not wanted.words:
        return "it holds no decisions that can be read"
    return f"none of its {count(found.count, 'decision')} has {wanted.words}"


def passing(store_path: Path | None, wanted: Filter) -> tuple[StoreFile, list[Decision]]:
    """The store's file that a command is about, and its decisions that pass; raises BadParameter if
    there are none."""
    found = open_store(store_path, wanted.may_pass)
    if found is None:
        raise refuse("--store", nothing_there(store_path))
    decisions = list(wanted.of(found.decisions))
    if not decisions:
        raise refuse("--store", f"{found.path}: {none_of(found, wanted)}")
    return found, decisions


def in_order(decisions: Iterable[Decision], by: str) -> list[Decision]:
    """The decisions sorted by one of the choices of ``--sort``."""
    return sorted(decisions, key=_ORDERS[by])


def _by_problem(decision: Decision) -> tuple[Any, ...]:
    problem = decision.problem
    return (
        problem.spatial_dims,
        # From the first layers of a network to the last, by and large.
        tuple(-size for size in problem.input_shape[2:]),
        problem.input_shape,
        problem.weight_shape,
        decision.key,
        problem.deterministic,
    )


def _by_time(decision: Decision) -> tuple[Any, ...]:
    chosen = decision.chosen
    time_ms = 0.0 if chosen is None else chosen.reported_ms or 0.0
    return (-time_ms, *_by_problem(decision))


def _by_workspace(decision: Decision) -> tuple[Any, ...]:
    return (-decision.candidate.workspace_bytes, *_by_problem(decision))


_ORDERS = {_PROBLEM: _by_problem, "time": _by_time, "workspace": _by_workspace}

sort_option = click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default=_PROBLEM,
    show_default=True,
    help="By problem, or the longest time or the largest workspace first.",
)
