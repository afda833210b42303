"""Fused groups in the forward of a training graph, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.conv.references import relative_error
from support.norms.frozen import GROUPS, Block, in_eval_mode, step, trained
from torch import nn

import cudnn_autotune as ca

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# The heuristics' engines: these tests ask what is computed, not how fast.
FUSED = {"fuse": "always", "norms": "never", "sampling": "heuristic"}


@pytest.mark.parametrize("norm", [in_eval_mode, trained])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_stage_under_autocast_errs_like_pytorch(
    layout: torch.memory_format, norm: Callable[[int], nn.Module]
) -> None:
    torch.manual_seed(0)
    blocks = (Block(norm, 32) for _ in range(3))
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), *blocks).cuda()
    model = model.to(memory_format=layout)
    x = torch.randn(4, 32, 24, 20).bfloat16().float().cuda().to(memory_format=layout)
    call = torch.compile(model, backend="cudnn_autotune", options=FUSED)
    with torch.autocast("cuda", torch.bfloat16):
        found, eager = step(call, model, x), step(model, model, x)
    fused = [group.text for group in ca.compilations()[-1].fused]
    assert fused == ([] if norm is trained else GROUPS * 3)
    exact = step(model.double(), model, x.double())
    for name, value in exact.items():
        error, allowed = (relative_error(one[name], value) for one in (found, eager))
        assert error <= 3 * allowed + 5e-3, name
