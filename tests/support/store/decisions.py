"""Problems, measurements and decisions for the tests of stores."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import torch

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.store.environment import Environment

H200 = Environment("NVIDIA H200", 132, "9.0", "", "9.19.0", "1.28.0")
L4 = Environment("NVIDIA L4", 58, "8.9", "", "9.19.0", "1.28.0")
NONDETERMINISTIC = "NONDETERMINISTIC"


def problem(**changes: Any) -> ca.ConvProblem:
    """Returns a convolution of half precision.

    ``size=n`` makes its input one column of height n with one channel, so that there are many
    distinct problems within the sizes that cuDNN can represent.
    """
    values: dict[str, Any] = {
        "op": "fprop",
        "weight_shape": (64, 64, 3, 3),
        "padding": 1,
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
    }
    values["input_shape"] = (64, 64, 56, 56)
    size = changes.pop("size", None)
    if size is not None:
        values.update(input_shape=(1, 1, size, 1), weight_shape=(1, 1, 3, 3))
    return ca.ConvProblem(**{**values, **changes})


def timed(
    text: str,
    time_ms: float | None,
    workspace_bytes: int = 0,
    *notes: str,
    rank: int = 0,
    **fields: Any,
) -> Measurement:
    """Returns a measurement; ``notes`` are its numerical notes."""
    candidate = Candidate(
        engine=rank,
        knobs={"KERNEL_CFG": rank},
        workspace_bytes=workspace_bytes,
        numerical_notes=notes,
        behavior_notes=(),
        text=text,
        heuristic_mode="A",
        rank=rank,
    )
    return Measurement(candidate, time_ms, 0 if time_ms is None else 9, **fields)


FRONTIER = (
    timed("fastest", 1.0, 1 << 20, NONDETERMINISTIC, rank=1, low_ms=0.99, high_ms=1.01),
    timed("small", 1.2, 1 << 10, NONDETERMINISTIC, rank=2),
    timed("strict", 1.5, 1 << 16, rank=3),
    timed("slow", 3.0, 0, rank=4, eliminated="out of the race after 9 calls"),
)
EVIDENCE = Evidence(
    rule="fastest", tied=("fastest",), regret_bound=0.003, confidence=0.95, clock_mhz=1980.0
)


def selection(
    ranking: Iterable[Measurement] = FRONTIER, evidence: Evidence = EVIDENCE
) -> Selection:
    return Selection(tuple(ranking), 36, evidence)


def decision(size: int | None = None, day: int = 1, **changes: Any) -> Decision:
    """Returns a decision that was measured on a day of January 2026.

    ``deterministic=True`` makes determinism a constraint of its measurement.
    """
    deterministic = changes.pop("deterministic", False)
    provenance = Provenance("580.65", "2.11.0", "0.1.0", f"2026-01-{day:02}T12:00:00Z")
    names = {"sampling": "mode", "workspace_limit": "workspace", "benchmark_limit": "benchmark"}
    terms = {names[name]: changes.pop(name) for name in names.keys() & changes.keys()}
    values: dict[str, Any] = {
        "problem": problem(size=size, deterministic=deterministic),
        "policy": Policy(**terms),
        "selection": selection(),
        "relative_error": 1e-3,
        "provenance": provenance,
    }
    return Decision(**{**values, **changes})


def at_limit(
    workspace_limit: int | None, day: int = 1, deterministic: bool = False, **changes: Any
) -> Decision:
    """Returns a decision measured under constraints, with the candidates that these allow."""
    fitting = [
        entry
        for entry in FRONTIER
        if (workspace_limit is None or entry.candidate.workspace_bytes <= workspace_limit)
        and not (deterministic and NONDETERMINISTIC in entry.candidate.numerical_notes)
    ]
    return decision(
        day=day,
        workspace_limit=workspace_limit,
        deterministic=deterministic,
        selection=selection(fitting, dataclasses.replace(EVIDENCE, tied=())),
        **changes,
    )


def under(known: Decision, **terms: Any) -> Decision:
    """Returns the same decision, measured under another policy."""
    return dataclasses.replace(known, policy=dataclasses.replace(known.policy, **terms))


def resealed(line: bytes, environment: Environment = H200) -> bytes:
    """Returns a changed line of a store's file with the right checksum."""
    rest = line[18:]
    return b'{"crc32":"%08x%s' % (zlib.crc32(rest, codec.seed(environment)), rest)


def measured_otherwise(known: Decision, time_ms: float, day: int) -> Decision:
    """Returns the same decision, measured again with another time."""
    first, *others = known.selection.ranking
    ranking = [dataclasses.replace(first, time_ms=time_ms), *others]
    provenance = dataclasses.replace(known.provenance, time=f"2026-01-{day:02}T12:00:00Z")
    return dataclasses.replace(known, selection=selection(ranking), provenance=provenance)
