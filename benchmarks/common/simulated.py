"""The simulated GPU that the tests compute, for dry runs without a GPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from simulation import SimulatedEngine, SimulatedGpu, SimulatedTimer, preset

__all__ = ["SimulatedEngine", "SimulatedGpu", "SimulatedTimer", "preset"]
