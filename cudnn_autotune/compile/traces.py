"""The record of a compiled graph in PyTorch's logs. ``TORCH_LOGS`` shows it as text, and
``TORCH_TRACE`` keeps it as an artifact of the graph, which ``tlparse`` lists."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import fields
from typing import Any

from torch._guards import CompileContext, compile_context
from torch._logging._internal import trace_structured

from cudnn_autotune.compile.compilation import Compilation
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.tuning import choice_log
from cudnn_autotune.tuning.choice import Choice

ARTIFACT = "cudnn_autotune"
"""Name of the artifact, whose payload is JSON."""

_log = logging.getLogger(__name__)
_PARTS = ("groups", "concatenations", "norms")
# A convolution by itself and one with what follows it have these in common.
_GEOMETRY = ("input_shape", "weight_shape", "stride", "padding", "dilation", "groups", "dtype")


def tell(record: Compilation, context: CompileContext | None) -> None:
    """Writes a record into PyTorch's logs.

    Args:
        context: the context in which Dynamo compiled the graph. What is written outside of it
            would belong to no graph.
    """
    _log.info("a compiled graph: %s", record)
    try:
        with compile_context(context):
            trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
                payload_fn=lambda: as_json(record),
                expect_trace_id=context is not None,
            )
    except Exception:  # a log is no reason for a call to fail
        _log.warning("a compiled graph is not in TORCH_TRACE", exc_info=True)


def as_json(record: Compilation) -> dict[str, Any]:
    """Returns a record as JSON, by the names of its fields. Each convolution has the choices of
    this process for it, forward and backward, by itself and with what follows it."""
    chosen: defaultdict[Hashable, list[Choice]] = defaultdict(list)
    for choice in choice_log.choices():
        chosen[_geometry(choice.problem)].append(choice)
    tree = _fields(record)
    for name in _PARTS:
        tree[name] = [_fields(part) for part in getattr(record, name)]
    for group in tree["groups"]:
        problem = group.pop("problem")
        found = [] if problem is None else chosen[_geometry(problem)]
        group["choices"] = [_of_choice(choice) for choice in found]
    return tree


def _fields(report: Any) -> dict[str, Any]:
    return {one.name: getattr(report, one.name) for one in fields(report)}


def _geometry(problem: ConvProblem) -> Hashable:
    return tuple(getattr(problem, name) for name in _GEOMETRY)


def _of_choice(choice: Choice) -> dict[str, Any]:
    return {
        "problem": choice.problem.text,
        "chosen": choice.text,
        "time_ms": choice.time_ms,
        "speedup": choice.speedup,
        "sampling": choice.sampling,
        "origin": choice.origin,
        "device": choice.device,
    }
