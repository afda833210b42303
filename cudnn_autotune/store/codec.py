"""Encoding of a decision as an entry, which is one line of a store's file. It holds a decision or
removes one:

    {"crc32":"5d1f00aa","name":"fprop x=64x64x56x56 ... sampling=auto","decision":{...}}
    {"crc32":"0c9be2f1","name":"fprop x=64x64x56x56 ... sampling=auto","decision":null}

The checksum covers the rest of the line and the environment's digest. It detects a line that was
torn or edited, and a line from the file of another environment.

A line has a bounded size. If not all timed candidates fit, those are kept that later questions may
need, in this order: the chosen one; PyTorch's own path and the plan that it runs; the best that
does not depend on which implementations are registered; the choices under determinism or any
tighter workspace limit; candidates tied with the chosen one; and the next ones in the ranking. The
others are counted.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.json_node import LARGEST_NUMBER, Node
from cudnn_autotune.engines.candidate_id import canonical, config_of
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_text
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision, Provenance, ranked_again, varies
from cudnn_autotune.store.environment import Environment

MOST_BYTES = 1900
"""The size in bytes to which a line with a decision is reduced."""
_BEGIN, _NAME, _DECISION = b'{"crc32":"', b'","name":', b',"decision":'
_CHECKED = len(_BEGIN) + 8
_NAMED = _CHECKED + len(_NAME)
_POLICY = " benchmark_limit="
_SAMPLING = " sampling="
_READ = "_read"
_DETERMINISTIC = " deterministic"
_OMITTED_BYTES = 24
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


# Names


def names(key: str) -> tuple[bytes, bytes]:
    """Returns the names of a key's two entries in a file, as quoted JSON: of the decisions measured
    without and with determinism."""
    problem, _, policy = key.partition(_POLICY)
    return _quoted(key), _quoted(f"{problem}{_DETERMINISTIC}{_POLICY}{policy}")


def name_of(decision: Decision) -> bytes:
    """Returns the name of the decision's entry."""
    plain, deterministic = names(decision.key)
    return deterministic if decision.problem.deterministic else plain


def key_of(name: bytes) -> str:
    """Returns the ``Decision.key`` to which the entry of this name belongs."""
    text = name[1:-1].decode(errors="replace")
    if b"\\" in name:
        with suppress(ValueError):
            text = Node(json.loads(name), "name").text()
    problem, separator, policy = text.partition(_POLICY)
    return problem.removesuffix(_DETERMINISTIC) + separator + policy


def problem_of(key: str) -> str:
    """Returns the part of a ``Decision.key`` that describes the problem."""
    return key.partition(_POLICY)[0]


def _quoted(text: str) -> bytes:
    return json.dumps(text).encode()


# Lines


def seed(environment: Environment) -> int:
    """Returns the initial value for the checksums of an environment's lines."""
    return zlib.crc32(environment.digest.encode())


def encode(decision: Decision, environment: Environment) -> bytes:
    """Returns a decision's line without a line feed; raises ValueError for a number that is not
    finite."""
    if is_as_read(decision, environment):
        return decision.__dict__[_READ][1]
    name = name_of(decision)
    room = MOST_BYTES - _NAMED - len(name) - len(_DECISION) - len("}\n")
    return sealed(name, body(decision, room).encode(), environment)


def removal(name: bytes, environment: Environment) -> bytes:
    """Returns the line that removes the decision of this name."""
    return sealed(name, b"null", environment)


def sealed(name: bytes, value: bytes, environment: Environment) -> bytes:
    """Returns the line for a name and a decision's JSON, with its checksum."""
    rest = b"%s%s%s%s}" % (_NAME, name, _DECISION, value)
    return b"%s%08x%s" % (_BEGIN, zlib.crc32(rest, seed(environment)), rest)


def name_in(line: bytes, seed: int) -> bytes | None:
    """Returns the name in a line without line feed, or None if its checksum is wrong; ``seed`` is
    its environment's."""
    checksum = b"%08x" % zlib.crc32(line[_CHECKED:], seed)
    if line[len(_BEGIN) : _CHECKED] != checksum or not line.startswith(_BEGIN):
        return None
    end = line.find(b'"', _NAMED + 1) + 1
    return line[_NAMED:end] if end and line.startswith(_NAME + b'"', _CHECKED) else None


def is_removal(line: bytes) -> bool:
    """Returns whether a line removes a decision. The line must have passed :func:`name_in`."""
    return line.endswith(b"%snull}" % _DECISION)


def decode(line: bytes, environment: Environment) -> Decision:
    """Returns the decision in a line that passed :func:`name_in`.

    Raises:
        ValueError: The line holds no decision, or one of another name.
    """
    try:
        tree = json.loads(line)
        described, _, terms = Node(tree["name"], "name").text().partition(_POLICY)
        limit, _, mode = terms.partition(_SAMPLING)
        text = described.removesuffix(_DETERMINISTIC)
        problem = problem_from_text(text, deterministic=described != text)
        decision = from_body(tree["decision"], problem, mode, int(limit))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not an entry: {error!r}") from error
    decision.__dict__[_READ] = (environment, line)
    if not line.startswith(name_of(decision), _NAMED):
        raise ValueError("the entry's name is not that of its problem")
    return decision


def is_as_read(decision: Decision, environment: Environment) -> bool:
    """Returns whether the decision was read from a line of this environment. It remembers that
    line, so writing it again changes nothing."""
    return _READ in decision.__dict__ and decision.__dict__[_READ][0] == environment


# Values. Each begins with the common case, which takes no node: a decision has a hundred values.


def _text(value: Any, name: str) -> str:
    return value if type(value) is str and value.isascii() else Node(value, name).text()


def _candidate(value: Any, name: str) -> str:
    return canonical(_text(value, name))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_text(one, name) for one in value)


def _count(value: Any, name: str) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else Node(value, name).integer()


def _number(value: Any, name: str) -> float | None:
    if value is None or (type(value) is float and 0 <= value <= LARGEST_NUMBER):
        return value
    return Node(value, name).number_or_null()


def _engine(value: Any, name: str) -> int | None:
    return None if value is None else _count(value, name)


def _knobs(value: Any, name: str) -> dict[str, int] | None:
    if value is None:
        return None
    return {knob: node.integer(-(2**63)) for knob, node in Node(value, name).object().items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


_COLUMNS: dict[str, tuple[Callable[[Any, str], Any], Any]] = {
    "text": (_candidate, ...),
    "workspace_bytes": (_count, ...),
    "heuristic_mode": (_text, ...),
    "rank": (_count, ...),
    "numerical_notes": (_texts, ...),
    "behavior_notes": (_texts, ...),
    "samples": (_count, ...),
    "time_ms": (_number, None),
    "low_ms": (_number, None),
    "high_ms": (_number, None),
    "sustained_ms": (_number, None),
    "eliminated": (_text, ""),
    "runs": (_candidate, ""),
    "engine": (_engine, None),
    "knobs": (_knobs, None),
}
"""Field of a measurement or its candidate -> function that reads its value, and the default that is
left out at a row's end (``...``: none)."""
COLUMNS = tuple(_COLUMNS)
"""The columns of a row of ``"ranking"``, in an order that never changes: a new one comes last. The
text determines the defaults of the engine and its knobs."""
_READERS = [(name, read) for name, (read, _) in _COLUMNS.items()]
_DEFAULTS = [default for _, default in _COLUMNS.values()]
_NEEDED = _DEFAULTS.count(...)
_NUMBERS = [place for place, (_, read) in enumerate(_READERS) if read is _number]
_ENGINE, _KNOBS = COLUMNS.index("engine"), COLUMNS.index("knobs")
_CANDIDATES = [field.name for field in fields(Candidate)]
_MEASURED = [field.name for field in fields(Measurement) if field.name != "candidate"]
_values_of = attrgetter(*(f"candidate.{n}" if n in _CANDIDATES else n for n in COLUMNS))
_of_candidate = itemgetter(*map(COLUMNS.index, _CANDIDATES))
_measured = itemgetter(*map(COLUMNS.index, _MEASURED))


def _row(entry: Measurement) -> list[Any]:
    row = list(_values_of(entry))
    for place in _NUMBERS:
        row[place] = _rounded(row[place])
    if config_of(entry.candidate.text) == (row[_ENGINE], row[_KNOBS]):
        row[_ENGINE] = row[_KNOBS] = None
    else:
        row[_KNOBS] = dict(row[_KNOBS])  # it may be any mapping
    while row[-1] in (None, ""):
        row.pop()
    return row


def _timed(row: Sequence[Any]) -> Measurement:
    if not _NEEDED <= len(row) <= len(COLUMNS):
        raise ValueError(
            f"a row of ranking must have {_NEEDED} to {len(COLUMNS)} values, got {len(row)}"
        )
    read = [read(value, name) for (name, read), value in zip(_READERS, row, strict=False)]
    full = read + _DEFAULTS[len(row) :]
    if full[_KNOBS] is None or (full[_ENGINE], full[_KNOBS]) == config_of(row[0]):
        engine, knobs = config_of(full[0])
        full[_ENGINE], full[_KNOBS] = engine, dict(knobs)
    return Measurement(Candidate(*_of_candidate(full)), *_measured(full))


# Bodies


def body(decision: Decision, most_bytes: int) -> str:
    """Returns the decision as JSON in ASCII. The decision that :func:`from_body` reads has the same
    JSON.

    The ranking is shortened to ``most_bytes``. The text is longer only if the chosen candidate and
    the evidence alone are.
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


_FIELDS = {
    *("workspace_limit", "relative_error", "rejected", "samples", "omitted"),
    *("evidence", "provenance", "ranking"),
}
"""The fields that :func:`body` writes. An unknown one may change what a decision means."""


def from_body(tree: Any, problem: ConvProblem, mode: str, benchmark: int) -> Decision:
    """Returns the decision for ``problem`` from the JSON that :func:`body` wrote.

    Raises:
        ValueError: ``tree`` is not such JSON; the message says why.
    """
    try:
        if unknown := tree.keys() - _FIELDS:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        ranking = tuple(map(_timed, tree["ranking"]))
        limit = tree.get("workspace_limit")
        workspace = None if limit is None else _count(limit, "workspace_limit")
        rejected = [
            (_candidate(text, "rejected"), _number(error, "rejected"))
            for text, error in tree.get("rejected", ())
        ]
        tied = tree["evidence"]["tied"]
        tied = [
            ranking[one].candidate.text if type(one) is int else _candidate(one, "tied")
            for one in tied
        ]
        evidence = {**tree["evidence"], "tied": tied}
        return Decision(
            problem,
            Policy(mode, workspace, benchmark),
            Selection(
                ranking,
                _count(tree["samples"], "samples"),
                json_dataclass.decode(Evidence, evidence, "evidence"),
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


def _by_importance(decision: Decision) -> Iterator[Measurement]:
    """Yields the entries of the ranking, the most important first; an entry may be repeated."""
    selection, chosen = decision.selection, decision.chosen
    by_text = {entry.candidate.text: entry for entry in selection.ranking}
    if chosen is not None:
        yield chosen
    own = by_text.get(OWN_PATH.text)
    if own is not None:
        yield own
        if own.runs in by_text:
            yield by_text[own.runs]
    yield from [e for e in selection.ranking if not e.candidate.id.is_implementation][:1]
    tied = list(selection.evidence.tied)
    for limit, deterministic in _tighter(selection, chosen):
        wrong = dict(decision.rejected)
        assert chosen is not None
        found = ranked_again(selection, chosen, wrong, deterministic, limit)
        if found is not None:
            yield by_text[found.winner.candidate.text]
            tied += found.evidence.tied
    yield from (by_text[text] for text in tied if text in by_text)
    yield from selection.ranking


def _tighter(selection: Selection, chosen: Measurement | None) -> Iterator[tuple[int, bool]]:
    """Yields tighter constraints under which another candidate may be chosen, the loosest limit
    first: a workspace limit in bytes, and whether outputs must be deterministic."""
    if chosen is None:
        return
    sizes = {entry.candidate.workspace_bytes for entry in selection.ranking}
    most = math.inf if chosen.runs else chosen.candidate.workspace_bytes
    for deterministic in (False, True):
        if deterministic and varies(chosen.candidate):
            most = math.inf
        yield from ((size, deterministic) for size in sorted(sizes, reverse=True) if size < most)
