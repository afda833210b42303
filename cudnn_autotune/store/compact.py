"""Encoding of a decision as JSON of bounded size, as a store's file keeps it.

If not all timed candidates fit, those are kept that later questions may need, in this order: the
chosen one; PyTorch's own path and the plan that it runs; the best that does not depend on which
implementations are registered; what determinism or any tighter workspace limit would choose; what
was tied with the chosen one; and the next ones in the ranking. The others are counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.json_node import MOST, Node
from cudnn_autotune.engines.candidate_id import config_of
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.store import rerank
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.provenance import Provenance

COLUMNS = (
    "text",
    "workspace_bytes",
    "heuristic_mode",
    "rank",
    "numerical_notes",
    "behavior_notes",
    "samples",
    "time_ms",
    "low_ms",
    "high_ms",
    "sustained_ms",
    "eliminated",
    "runs",
    "engine",
    "knobs",
)
"""The columns of a row of ``"ranking"``. Values at the end of a row that equal their default are
left out. The engine and its knobs default to those that the text names."""
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, "", "", None, None)
_OMITTED_BYTES = 24
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encode(decision: Decision, most_bytes: int) -> str:
    """Returns the decision as one line of JSON in ASCII; that of :func:`decode` is the same again.

    The ranking is shortened to ``most_bytes``, which the text exceeds only if the chosen candidate
    and the evidence alone do.
    """
    rows = [_dumped(_row(entry)) for entry in decision.selection.ranking]
    text = _joined(decision, rows, range(len(rows)))
    if len(text) <= most_bytes:
        return text
    room = most_bytes - (len(text) - sum(len(row) + 1 for row in rows)) - _OMITTED_BYTES
    kept: set[int] = set()
    places = {id(entry): place for place, entry in enumerate(decision.selection.ranking)}
    for entry in _by_importance(decision):
        place = places[id(entry)]
        size = len(rows[place]) + 1
        if place not in kept and (size <= room or not kept):
            kept.add(place)
            room -= size
    return _joined(decision, rows, sorted(kept))


def decode(tree: Any, problem: ConvProblem, sampling: str, benchmark_limit: int) -> Decision:
    """Returns the decision for ``problem`` from the JSON that :func:`encode` wrote.

    Raises:
        ValueError: ``tree`` is not such JSON; the message says why.
    """
    try:
        ranking = tuple(map(_timed, tree["ranking"]))
        limit = tree.get("workspace_limit")
        rejected = [
            (_text(text, "rejected"), _number(error, "rejected"))
            for text, error in tree.get("rejected", ())
        ]
        return Decision(
            problem=problem,
            sampling=sampling,
            benchmark_limit=benchmark_limit,
            workspace_limit=None if limit is None else _count(limit, "workspace_limit"),
            selection=Selection(
                ranking, _count(tree["samples"], "samples"), _evidence(tree["evidence"], ranking)
            ),
            relative_error=_number(tree.get("relative_error"), "relative_error"),
            rejected=tuple((text, math.inf if e is None else e) for text, e in rejected),
            provenance=json_dataclass.decode(Provenance, tree["provenance"], "provenance"),
            omitted=_count(tree.get("omitted", 0), "omitted"),
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a decision: {error!r}") from error


def _joined(decision: Decision, rows: Sequence[str], kept: Sequence[int]) -> str:
    selection = decision.selection
    ranking = [entry.candidate.text for entry in selection.ranking]
    numbers = {ranking[place]: number for number, place in enumerate(kept)}
    gone = set(ranking) - set(numbers)
    tied = [numbers.get(text, text) for text in selection.evidence.tied if text not in gone]
    tree = {
        "workspace_limit": decision.workspace_limit,
        "relative_error": _rounded(decision.relative_error),
        "rejected": [[text, _rounded(error)] for text, error in decision.rejected] or None,
        "samples": selection.total_samples,
        "omitted": decision.omitted + len(rows) - len(kept) or None,
        "evidence": {**json_dataclass.encode(selection.evidence), "tied": tied},
        "provenance": json_dataclass.encode(decision.provenance),
    }
    lean = {name: value for name, value in tree.items() if value is not None}
    return f'{_dumped(lean)[:-1]},"ranking":[{",".join(rows[place] for place in kept)}]}}'


def _dumped(value: Any) -> str:
    return _ENCODER.encode(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _by_importance(decision: Decision) -> Iterator[Measurement]:
    """Yields the entries of the ranking, the most important first; an entry may be repeated."""
    selection, chosen = decision.selection, decision.chosen
    by_text = {entry.candidate.text: entry for entry in selection.ranking}
    if chosen is not None:
        yield chosen
    own = by_text.get(ATEN.text)
    if own is not None:
        yield own
        if own.runs in by_text:
            yield by_text[own.runs]
    yield from [e for e in selection.ranking if not e.candidate.id.is_implementation][:1]
    tied = list(selection.evidence.tied)
    for limit, deterministic in _tighter(selection, chosen):
        wrong = dict(decision.rejected)
        assert chosen is not None
        found = rerank.restricted_to(selection, chosen, wrong, deterministic, limit)
        if found is not None:
            yield by_text[found.winner.candidate.text]
            tied += found.evidence.tied
    yield from (by_text[text] for text in tied if text in by_text)
    yield from selection.ranking


def _tighter(selection: Selection, chosen: Measurement | None) -> Iterator[tuple[int, bool]]:
    """Yields tighter constraints for which another candidate may be chosen, the loosest limit
    first: a workspace limit in bytes, and whether determinism is asked for."""
    if chosen is None:
        return
    sizes = {entry.candidate.workspace_bytes for entry in selection.ranking}
    most = math.inf if chosen.runs else chosen.candidate.workspace_bytes
    for deterministic in (False, True):
        if deterministic and rerank.varies(chosen.candidate):
            most = math.inf
        yield from ((size, deterministic) for size in sorted(sizes, reverse=True) if size < most)


def _row(entry: Measurement) -> list[Any]:
    candidate = entry.candidate
    times = (entry.time_ms, entry.low_ms, entry.high_ms, entry.sustained_ms)
    row = [
        *(candidate.text, candidate.workspace_bytes, candidate.heuristic_mode, candidate.rank),
        *(candidate.numerical_notes, candidate.behavior_notes, entry.samples),
        *map(_rounded, times),
        *(entry.eliminated, entry.runs),
    ]
    if config_of(candidate.text) != (candidate.engine, candidate.knobs):
        return [*row, candidate.engine, dict(candidate.knobs)]
    while row[-1] in (None, ""):
        row.pop()
    return row


def _evidence(tree: dict[str, Any], ranking: Sequence[Measurement]) -> Evidence:
    tied = [ranking[one].candidate.text if type(one) is int else one for one in tree["tied"]]
    return json_dataclass.decode(Evidence, {**tree, "tied": tied}, "evidence")


def _timed(row: Sequence[Any]) -> Measurement:
    missing = len(COLUMNS) - len(row)
    full = (*row, *_DEFAULTS[len(_DEFAULTS) - missing :]) if missing > 0 else row
    text, workspace_bytes, mode, rank, numerical, behavior, samples, *times = full[:11]
    eliminated, runs, engine, knobs = full[11:]
    if knobs is None:
        engine, knobs = config_of(_text(text, "text"))
    else:
        named = Node(knobs, "knobs").object()
        knobs = {name: value.integer(-(2**63)) for name, value in named.items()}
    candidate = Candidate(
        engine=None if engine is None else _count(engine, "engine"),
        knobs=dict(knobs),
        workspace_bytes=_count(workspace_bytes, "workspace_bytes"),
        numerical_notes=tuple(_text(note, "numerical_notes") for note in numerical),
        behavior_notes=tuple(_text(note, "behavior_notes") for note in behavior),
        text=_text(text, "text"),
        heuristic_mode=_text(mode, "heuristic_mode"),
        rank=_count(rank, "rank"),
    )
    time_ms, low_ms, high_ms, sustained_ms = map(_number, times, COLUMNS[7:])
    samples, eliminated = _count(samples, "samples"), _text(eliminated, "eliminated")
    alone = (low_ms, high_ms, sustained_ms)
    return Measurement(candidate, time_ms, samples, *alone, eliminated, _text(runs, "runs"))


# Each of these begins with the common case, which takes no node: a decision has a hundred values.
def _text(value: Any, name: str) -> str:
    return value if type(value) is str and value.isascii() else Node(value, name).text()


def _count(value: Any, name: str) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else Node(value, name).integer()


def _number(value: Any, name: str) -> float | None:
    if value is None or (type(value) is float and 0 <= value <= MOST):
        return value
    return Node(value, name).number_or_null()
