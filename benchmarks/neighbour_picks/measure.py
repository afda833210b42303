"""The workers of neighbours.py: one fills the stores, one for each arm picks, one judges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from common import numbers
from common.sources import failure

from .backends import backend_of
from .changes import CHANGES, changed, distance

_LEADERS = 6  # of the full race: one of them is the best, whatever was picked


def _problem(case: dict[str, Any]) -> Any:
    from cudnn_autotune.audit.layers import Case

    return Case(**case).problem()


def _out_of_time(request: dict[str, Any], begin: float) -> bool:
    return time.monotonic() - begin > request["seconds"]


def fill(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tunes the changed shapes of each case into a store of its own, each as if the store knew
    none of the others; one record a case, with one entry a change."""
    import cudnn_autotune as ca

    begin = time.monotonic()
    backend = backend_of(request["device"])
    for name, case in request["cases"].items():
        if _out_of_time(request, begin):
            return
        problem = _problem(case["case"])
        ca.set_store(case["store"], mode="retune")
        told: dict[str, Any] = {}
        for change in request["changes"]:
            varied = changed(problem, CHANGES[change])
            if varied is None:
                continue
            known = {
                "input_shape": list(varied.input_shape),
                "weight_shape": list(varied.weight_shape),
                "distance": numbers.significant(distance(problem, varied), 3),
            }
            try:
                told[change] = known | _told(backend.choose(varied, request["sampling"], None))
            except RuntimeError as error:
                told[change] = known | {"error": failure(error)}
            backend.tidy()
        yield {"case": name, "changes": told}


def pick(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What one arm picks for each case, in a process that has seen none of them."""
    import cudnn_autotune as ca
    from cudnn_autotune.engines.configs import ATEN

    begin = time.monotonic()
    backend = backend_of(request["device"])
    mode = request["mode"] or request["sampling"]
    for name, case in request["cases"].items():
        if _out_of_time(request, begin):
            return
        ca.set_store(case["store"], mode="read" if request["neighbours"] else "off")
        try:
            choice = backend.choose(_problem(case["case"]), mode, request["budget_ms"])
            # PyTorch's path leads where it is cuDNN's first plan under another name.
            leaders = [text for text, _ in choice.ranking if text != ATEN.text]
            told = _told(choice) | {"leaders": leaders[:_LEADERS]}
        except RuntimeError as error:
            told = {"error": failure(error)}
        backend.tidy()
        yield {"case": name, **told}


def _told(choice: Any) -> dict[str, Any]:
    selection = choice.selection
    return {
        "text": choice.text,
        "wall_ms": numbers.significant(choice.tuning_ms, 4),
        "launches": choice.total_samples,
        "rule": selection.evidence.rule if selection else "",
    }


def judge(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times of all that was picked for each case, and of the race's leaders, in interleaved rounds
    of short batches, cold and hot."""
    from cudnn_autotune.audit import oracle
    from cudnn_autotune.audit.comparison import candidate_of
    from cudnn_autotune.audit.config import OracleSettings
    from cudnn_autotune.core import json_dataclass

    begin = time.monotonic()
    backend = backend_of(request["device"])
    settings = OracleSettings(rounds=request["rounds"])
    for name, case in request["cases"].items():
        if _out_of_time(request, begin):
            return
        timer = None
        try:
            timer, known = backend.open(_problem(case["case"]))
            texts = dict.fromkeys([*case["picked"], *case["leaders"]])
            contenders = [candidate_of(text, known) for text in texts]
            found = oracle.measure(timer, contenders, case["picked"], settings)
            yield {"case": name, "oracle": json_dataclass.encode(found)}
        except (RuntimeError, ValueError) as error:
            yield {"case": name, "error": failure(error)}
        finally:
            if timer is not None:
                backend.close(timer)
            timer = None  # it holds the operands
            backend.tidy()
