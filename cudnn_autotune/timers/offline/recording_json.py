"""A recording as plain JSON, and back with every value checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.configs import HEURISTIC_MODES, Candidate
from cudnn_autotune.engines.problem_json import problem_from_json, problem_to_json
from cudnn_autotune.timers.offline.recording_parts import (
    Reading,
    RecordedCandidate,
    Rounds,
    Row,
    SoloTrace,
)
from cudnn_autotune.timers.timer import Cache, GpuState

FORMAT = "cudnn-autotune recording"
VERSION = 2
"""1, which is still read, had no ``power_w`` in ``solo`` and no ``reports_throttling`` in
``readings``."""

_DIGITS = 5
_LEAST = 1e-9
"""Below any time or clock: what is divided by must not underflow."""
_MOST_THREADS = 4096
"""That compile plans: a replay keeps a number for each."""
_STATE_NUMBERS = ("power_w", "power_limit_w", "temperature_c", "clock_mhz", "max_clock_mhz")


def to_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields``: those of a ``Recording``, by name."""
    return {
        "format": FORMAT,
        "version": fields["version"],
        "environment": dict(fields["environment"]),
        "problem": problem_to_json(fields["problem"]),
        "aten_uses_cudnn": fields["aten_uses_cudnn"],
        "candidates": [_candidate_to_json(c) for c in fields["candidates"]],
        "cold": _rounds_to_json(fields["cold"]),
        "hot": _rounds_to_json(fields["hot"]),
        "lone": [_rounded(row) for row in fields["lone"]],
        "solo": [_trace_to_json(trace) for trace in fields["solo"]],
        "readings": [_reading_to_json(r, fields["version"]) for r in fields["readings"]],
        "build_threads": fields["build_threads"],
        "run_overhead_ms": _digits(fields["run_overhead_ms"]),
        "remarks": list(fields["remarks"]),
    }


def fields_from_json(tree: Any) -> dict[str, Any]:
    """The arguments of ``Recording``. Raises ValueError, ``field: what is wrong``."""
    root = Node(tree, "")
    given = root.object() if isinstance(tree, dict) else {}
    if "format" not in given or given["format"].value != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}; this is no recording")
    version = _version(given.get("version", Node(None, "version")))
    fields = root.fields(
        "format",
        "version",
        "environment",
        "problem",
        "aten_uses_cudnn",
        "candidates",
        "cold",
        "hot",
        "lone",
        "solo",
        "readings",
        "build_threads",
        "run_overhead_ms",
        "remarks",
    )
    return {
        "environment": {n: _plain(v) for n, v in fields["environment"].object().items()},
        "problem": problem_from_json(fields["problem"].value, fields["problem"].place),
        "aten_uses_cudnn": fields["aten_uses_cudnn"].boolean(),
        "candidates": tuple(_candidate(c) for c in fields["candidates"].items()),
        "cold": _rounds(fields["cold"]),
        "hot": _rounds(fields["hot"]),
        "lone": _rows(fields["lone"]),
        "solo": tuple(_trace(t, version) for t in fields["solo"].items()),
        "readings": tuple(_reading(r, version) for r in fields["readings"].items()),
        "build_threads": fields["build_threads"].integer(1, _MOST_THREADS),
        "run_overhead_ms": fields["run_overhead_ms"].number(),
        "remarks": _texts(fields["remarks"]),
        "version": version,
    }


def _version(node: Node) -> int:
    if type(node.value) is not int or not 1 <= node.value <= VERSION:
        raise node.error(f"1 to {VERSION}; this package reads no other")
    return node.value


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _rounded(row: Row) -> list[float | None]:
    return [_digits(value) for value in row]


def _clocks(row: Row) -> list[int | None]:
    return [None if clock is None else round(clock) for clock in row]


def _candidate_to_json(recorded: RecordedCandidate) -> dict[str, Any]:
    candidate = recorded.candidate
    return {
        "text": candidate.text,
        "engine": candidate.engine,
        "knobs": dict(candidate.knobs),
        "workspace_bytes": candidate.workspace_bytes,
        "numerical_notes": list(candidate.numerical_notes),
        "behavior_notes": list(candidate.behavior_notes),
        "heuristic_mode": candidate.heuristic_mode,
        "rank": candidate.rank,
        "built": recorded.built,
        "build_ms": _digits(recorded.build_ms),
        "first_run_ms": _digits(recorded.first_run_ms),
        "warm_ms": _digits(recorded.warm_ms),
        "error": recorded.error,
    }


def _candidate(node: Node) -> RecordedCandidate:
    fields = node.fields(
        *("text", "engine", "knobs", "workspace_bytes", "numerical_notes", "behavior_notes"),
        *("heuristic_mode", "rank", "built", "build_ms", "first_run_ms", "warm_ms", "error"),
    )
    text = fields["text"].text()
    if not text:
        raise fields["text"].error("a text that is not empty")
    engine = fields["engine"]
    mode = fields["heuristic_mode"].one_of(("", *HEURISTIC_MODES))
    # Only a heuristic's candidates are sure to be cuDNN's.
    number = None if engine.value is None and not mode else engine.integer()
    candidate = Candidate(
        engine=number,
        knobs={name: value.integer(-(2**63)) for name, value in fields["knobs"].object().items()},
        workspace_bytes=fields["workspace_bytes"].integer(),
        numerical_notes=_texts(fields["numerical_notes"]),
        behavior_notes=_texts(fields["behavior_notes"]),
        text=text,
        heuristic_mode=mode,
        rank=fields["rank"].integer(),
    )
    recorded = RecordedCandidate(
        candidate,
        built=fields["built"].boolean(),
        build_ms=fields["build_ms"].number_or_null(),
        first_run_ms=fields["first_run_ms"].number_or_null(above=_LEAST),
        warm_ms=fields["warm_ms"].number_or_null(above=_LEAST),
        error=fields["error"].text(),
    )
    if recorded.first_run_ms is None and not recorded.error:
        raise ValueError(f"{node.place}.error: must say why first_run_ms is null")
    if not recorded.built and recorded.first_run_ms is not None:
        raise ValueError(f"{node.place}.first_run_ms: must be null, as it was not built")
    return recorded


def _rounds_to_json(rounds: Rounds) -> dict[str, Any]:
    return {
        "calls": list(rounds.calls),
        "time_ms": [_rounded(row) for row in rounds.time_ms],
        "clock_mhz": [_clocks(row) for row in rounds.clock_mhz],
    }


def _rounds(node: Node) -> Rounds:
    fields = node.fields("calls", "time_ms", "clock_mhz")
    return Rounds(
        calls=tuple(n.integer() for n in fields["calls"].items()),
        time_ms=_rows(fields["time_ms"]),
        clock_mhz=_rows(fields["clock_mhz"]),
    )


def _rows(node: Node) -> tuple[Row, ...]:
    return tuple(_row(row) for row in node.items())


def _row(node: Node) -> Row:
    return tuple(n.number_or_null(above=_LEAST) for n in node.items())


def _trace_to_json(trace: SoloTrace) -> dict[str, Any]:
    powers = {} if trace.power_w is None else {"power_w": _rounded(trace.power_w)}
    return {
        "text": trace.text,
        "cache": trace.cache,
        "calls": trace.calls,
        "at_ms": [round(at, 2) for at in trace.at_ms],
        "time_ms": _rounded(trace.time_ms),
        "clock_mhz": _clocks(trace.clock_mhz),
        **powers,
    }


def _trace(node: Node, version: int) -> SoloTrace:
    powers = ("power_w",) if version > 1 else ()
    fields = node.fields("text", "cache", "calls", "at_ms", "time_ms", "clock_mhz", *powers)
    return SoloTrace(
        text=fields["text"].text(),
        cache=cast(Cache, fields["cache"].one_of(("cold", "hot"))),
        calls=fields["calls"].integer(1),
        at_ms=tuple(n.number() for n in fields["at_ms"].items()),
        time_ms=tuple(n.number(above=_LEAST) for n in fields["time_ms"].items()),
        clock_mhz=_row(fields["clock_mhz"]),
        power_w=_row(fields["power_w"]) if powers else None,
    )


def _reading_to_json(reading: Reading, version: int) -> dict[str, Any]:
    state = reading.state
    return {
        "at_ms": round(reading.at_ms, 2),
        "phase": reading.phase,
        **{name: _digits(getattr(state, name)) for name in _STATE_NUMBERS},
        "throttle_reasons": list(state.throttle_reasons),
        **({"tells_throttling": state.reports_throttling} if version > 1 else {}),
    }


def _reading(node: Node, version: int) -> Reading:
    tells = ("tells_throttling",) if version > 1 else ()
    fields = node.fields("at_ms", "phase", *_STATE_NUMBERS, "throttle_reasons", *tells)
    numbers: dict[str, Any] = {name: fields[name].number_or_null() for name in _STATE_NUMBERS}
    state = GpuState(
        **numbers,
        throttle_reasons=_texts(fields["throttle_reasons"]),
        reports_throttling=fields["tells_throttling"].boolean() if tells else False,
    )
    return Reading(fields["at_ms"].number(), fields["phase"].text(), state)


def _texts(node: Node) -> tuple[str, ...]:
    return tuple(n.text() for n in node.items())


def _plain(node: Node) -> str | int | float | None:
    value = node.value
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return node.integer()
    return node.number()
