"""What is chosen for converted norms that are trained with a store, on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms.plan import FORMS
from support.norms.served import norms_on_cpu


def trained(fastest: str, sides: Sequence[int]) -> dict[str, Any]:
    """Calls a new norm with images of these sides.

    Args:
        fastest: what seems the fastest where anything is timed.
        sides: lengths of the images' sides.

    Returns:
        ``chosen``: what was chosen for each side, and its source; ``timed``: how often any was.
    """
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
