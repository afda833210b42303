"""The work of an audit's processes on a simulation: all of an audit but the GPU.

A dry run, for tests of what surrounds the measurements. (``audit --simulate`` does not come here:
it stays in one process, see ``scenes``.)
"""

from __future__ import annotations

from typing import Any

from cudnn_autotune.audit.comparison import against_pytorch, candidate_of
from cudnn_autotune.audit.model import Oracle, Pick, PytorchRow
from cudnn_autotune.audit.oracle import measure
from cudnn_autotune.audit.oracle_settings import OracleSettings
from cudnn_autotune.audit.scenes import SimulatedScene, pick, seed_of
from cudnn_autotune.core.json_dataclass import decode
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.sampling.strategy import Limits


def open_backend(request: dict[str, Any]) -> SimulationBackend:
    return SimulationBackend(request)


class SimulationBackend:
    """See ``backend.Backend``; a case is ``{"simulation": preset}``."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._settings = decode(OracleSettings, request["oracle"], "oracle")
        self._limits = Limits(budget_ms=request["budget_ms"])
        self._name = request["name"]
        self._mode = request["mode"]

    def work(
        self, task: str, case: dict[str, Any], request: dict[str, Any]
    ) -> Pick | PytorchRow | Oracle:
        scene = SimulatedScene(case["simulation"])
        seed = seed_of(self._settings.seed, scene.id, self._name)
        if task == "pick":
            return pick(scene, self._mode, seed, self._limits)
        timer, offered = scene.open(seed)
        known = [*offered.all(), *offered.beyond()]
        if task == "oracle":
            return measure(timer, known, request["picked"], self._settings)
        reference = candidate_of(request["reference"], known)
        if len(timer.runnable([ATEN, reference])) < 2:
            return PytorchRow(error=f"{scene.id} has no path of PyTorch's own")
        begin = timer.elapsed_ms()
        ratios = against_pytorch(timer, reference, self._settings)
        tuning_ms = timer.elapsed_ms() - begin
        return PytorchRow(reference.text, ratios, tuning_ms, self._settings.solo)
