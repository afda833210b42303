"""Which configs are alike: those of one engine with one tile, or one kernel.

Such as differ in other knobs only (clusters, splits, workspace) are as fast as one another within
some percent, in turns and alone.
"""

from __future__ import annotations

from cudnn_autotune.engines.configs import Candidate

# The knobs that name a config's tile or kernel.
_TILES = ("TILE_SIZE", "KERNEL_CFG")


def config_family(candidate: Candidate) -> tuple[object, ...]:
    """Equal for configs that are alike; of what has no such knob, itself."""
    named = tuple(candidate.knobs.get(knob) for knob in _TILES)
    return (candidate.engine, *named) if any(k is not None for k in named) else (candidate.text,)
