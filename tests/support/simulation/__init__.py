"""A GPU that tests compute: its clock, power limit and noise, and engines of known times."""

from cudnn_autotune.audit.offline.stand_ins import StaticCandidates
from support.simulation.gpu import Noise, SimulatedEngine, SimulatedGpu
from support.simulation.small import GPU, PROBLEM, STILL, candidate, engine, timer_of
from support.simulation.timer import SimulatedTimer, Watched, preset, preset_names

__all__ = [
    "GPU",
    "Noise",
    "PROBLEM",
    "STILL",
    "SimulatedEngine",
    "SimulatedGpu",
    "SimulatedTimer",
    "StaticCandidates",
    "Watched",
    "candidate",
    "engine",
    "preset",
    "preset_names",
    "timer_of",
]
