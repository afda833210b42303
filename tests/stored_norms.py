"""A process that trains a converted norm with the store of its environment, on a CPU as on a GPU.

    python stored_norms.py FASTEST SIDE...

FASTEST is what seems the fastest where anything is timed; a SIDE is that of an image. Prints as
JSON for each side what was chosen and its source, and how often anything was timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from served_norms import norms_on_cpu
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.engines.norms.plan import FORMS
from cudnn_autotune.nn import norm_choices, norm_measuring


def trained(fastest: str, sides: Sequence[int]) -> dict[str, Any]:
    """Calls a new norm with images of these sides. Returns what the module says that it prints."""
    timed = 0

    def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        nonlocal timed
        timed += 1
        return {name: 1.0 + (name != fastest) for name in programs}

    with norms_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
        patch.setattr(norm_measuring, "time_in_turns", in_turns)
        model = ca.convert(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        for side in sides:
            model(torch.randn(4, 8, side, side))
        choices = norm_choices.choices_of(model[0])
    return {"chosen": [[one.chosen, one.source] for one in choices], "timed": timed}


if __name__ == "__main__":
    print(json.dumps(trained(sys.argv[1], [*map(int, sys.argv[2:])])))
