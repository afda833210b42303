"""Audits of simulated GPUs: the cases, and the backend of an audit's worker processes.

A backend's case is ``{"simulation": preset}``.
"""

from __future__ import annotations

import math
from typing import Any

from cudnn_autotune.audit.judged_turns import OracleSettings
from cudnn_autotune.audit.model import (
    BURST_COLD,
    BURST_HOT,
    SUSTAINED,
    Oracle,
    Pick,
    PytorchRow,
    Truth,
)
from cudnn_autotune.audit.offline_cases import pick, seed_of
from cudnn_autotune.audit.oracle import against_pytorch, candidate_of, measure
from cudnn_autotune.core.json_dataclass import decode
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.sampling.strategy import Limits
from support.simulation.timer import SimulatedTimer, preset


class SimulatedCase:
    """A preset in the place of an ``offline_cases.RecordedCase``; its truth is exact.

    Raises:
        ValueError: ``name`` is no preset.
    """

    def __init__(self, name: str) -> None:
        self.id = name
        self._timer = preset(name)

    def described(self) -> dict[str, Any]:
        return {"simulation": self.id, "gpu": self._timer.gpu.name}

    def open(self, seed: int) -> SimulatedTimer:
        return preset(self.id, seed)

    def oracle(self) -> Oracle:
        truth = self._timer.truth
        cold, hot = truth("sustained", "cold"), truth("sustained", "hot")
        return Oracle(
            {
                BURST_COLD: Truth(truth("burst", "cold")),
                BURST_HOT: Truth(truth("burst", "hot")),
                SUSTAINED: Truth({text: math.sqrt(ms * hot[text]) for text, ms in cold.items()}),
            },
            candidates=len(self._timer.engines),
        )


def open_backend(request: dict[str, Any]) -> SimulationBackend:
    return SimulationBackend(request)


class SimulationBackend:
    """Does what ``audit.gpu.GpuBackend`` does, on a simulated GPU."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._settings = decode(OracleSettings, request["oracle"], "oracle")
        self._limits = Limits(budget_ms=request["budget_ms"])
        self._name = request["name"]
        self._mode = request["mode"]

    def work(
        self, task: str, case: dict[str, Any], request: dict[str, Any]
    ) -> Pick | PytorchRow | Oracle:
        simulated = SimulatedCase(case["simulation"])
        seed = seed_of(self._settings.seed, simulated.id, self._name)
        if task == "pick":
            return pick(simulated, self._mode, seed, self._limits)  # type: ignore[arg-type]
        timer = simulated.open(seed)
        known = [*timer.candidates.all(), *timer.candidates.beyond()]
        if task == "oracle":
            return measure(timer, known, request["picked"], self._settings)
        reference = candidate_of(request["reference"], known)
        if len(timer.runnable([OWN_PATH, reference])) < 2:
            return PytorchRow(error=f"{simulated.id} has no path of PyTorch's own")
        begin = timer.elapsed_ms()
        ratios = against_pytorch(timer, reference, self._settings)
        tuning_ms = timer.elapsed_ms() - begin
        return PytorchRow(reference.text, ratios, tuning_ms, self._settings.solo)
