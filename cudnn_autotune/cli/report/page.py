"""The report: one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources

import jinja2
from markupsafe import Markup

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.far import farthest
from cudnn_autotune.cli.report.section import section, when
from cudnn_autotune.core import versions
from cudnn_autotune.core.display import milliseconds, printable
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning.gain import Total, by_mode, lines, total

_FILES = resources.files(__package__)
_OPEN_UP_TO = 3
_MOST_DISTANT = 10
_FILTERS = {
    "ms": milliseconds,
    "interval": wording.interval,
    "size": wording.size,
    "duration": wording.duration,
    "ratio": wording.ratio,
    "shapes": wording.shapes,
    "dtype": wording.dtype,
    "layout": wording.layout,
}


def render(
    decisions: Iterable[Decision],
    environment: Environment,
    *,
    source: str,
    selected: str = "",
    peaks: Peaks | None = None,
) -> str:
    """The page's HTML, with one or more decisions in their order.

    Every text of the decisions and of the environment is escaped. The page's own policy
    (Content-Security-Policy) allows no script and no style but its own, and loads nothing.

    Args:
        source: the store's name, for the page's end.
        selected: which part of the store is shown, in words; empty for all of it.
        peaks: those of the GPU; without them the page shows no limits.
    """
    found = list(decisions)
    numbers = {id(decision): number for number, decision in enumerate(found, start=1)}
    style, script = _text("page.css"), _text("page.js")
    engine = jinja2.Environment(
        autoescape=True,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
        # A name that the template has and this call lacks is an error, not a gap.
        undefined=jinja2.StrictUndefined,
    )
    engine.filters.update(_FILTERS)
    return engine.from_string(_text("page.html.j2")).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        environment=_named(environment),
        source=source,
        selected=selected,
        written=when(datetime.now(UTC).isoformat()),
        version=versions.version(),
        headline=_headline(found),
        gains=lines(found),
        totals=list(_totals(found)),
        sections=[section(decision, peaks) for decision in found],
        has_limits=peaks is not None,
        distant=[(numbers[id(d.decision)], d) for d in farthest(found, peaks, _MOST_DISTANT)],
        many_modes=len(by_mode(found)) > 1,
        is_open=len(found) <= _OPEN_UP_TO,
        span=_span(found),
    )


def _printed(value: object) -> object:
    is_plain = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value) if is_plain else value  # type: ignore[arg-type]


def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _named(environment: Environment) -> tuple[tuple[str, str], ...]:
    gpu = environment.gpu
    if environment.mig_profile:
        gpu += f", MIG {environment.mig_profile}"
    named = (
        ("GPU", gpu),
        ("multiprocessors", str(environment.multiprocessors or "")),
        ("compute capability", environment.compute_capability),
        ("cuDNN", environment.cudnn),
        ("cuDNN frontend", environment.cudnn_frontend),
    )
    return tuple((name, text) for name, text in named if text)


def _span(decisions: Sequence[Decision]) -> str:
    times = [decision.provenance.time for decision in decisions]
    first, last = when(min(times)), when(max(times))
    return first if first == last else f"{first} to {last}"


def _headline(decisions: Sequence[Decision]) -> str:
    """The ratio to PyTorch, for each mode if there are several."""
    modes = {mode: total(of_mode) for mode, of_mode in by_mode(decisions).items()}
    known = {mode: t for mode, t in modes.items() if t.ratio is not None}
    if not known:
        return "Gain over PyTorch not known"
    ratios = (
        wording.ratio(t.ratio, t.is_sure) + (f" by {mode}" if len(modes) > 1 else "")
        for mode, t in known.items()
    )
    return f"{', '.join(ratios)} the speed of PyTorch"


def _totals(decisions: Sequence[Decision]) -> Iterator[tuple[str, Total]]:
    """A name and the total for each operation of a mode, and for each mode."""
    modes = by_mode(decisions)
    for mode, of_mode in modes.items():
        prefix = f"{mode}: " if len(modes) > 1 else ""
        ops = dict.fromkeys(decision.problem.op for decision in of_mode)
        if len(ops) > 1:
            for op in ops:
                yield prefix + op, total(d for d in of_mode if d.problem.op == op)
        yield prefix + "all", total(of_mode)
