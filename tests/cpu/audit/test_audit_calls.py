"""Audit: the calls that its processes time are the convolutions that they mean."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from support.simulation import PROBLEM, candidate

from cudnn_autotune import Choice, ConvProblem, Measurement, Selection
from cudnn_autotune.audit.model import Pick
from cudnn_autotune.core.json_dataclass import decode, encode
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision

gpu = pytest.importorskip("cudnn_autotune.audit.gpu", reason="needs a CUDA build")


@pytest.mark.search
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_our_call(op: str) -> None:
    problem = ConvProblem(
        op, (2, 6, 9, 7), (4, 3, 3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2
    )
    x, w = torch.randn(2, 6, 9, 7), torch.randn(4, 3, 3, 2)
    y = torch.randn(problem.output_shape)
    found = gpu._our_call(problem, (x, w, y), "heuristic")()
    x.requires_grad_()
    w.requires_grad_()
    forward = torch.nn.functional.conv2d(x, w, None, (2, 1), (1, 0), (1, 2), 2)
    forward.backward(y)
    expected = {"fprop": forward, "dgrad": x.grad, "wgrad": w.grad}[op]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("error", [math.inf, math.nan, 1e30])
def test_an_engine_that_was_wrong_beyond_measure_is_told_and_read(error: float) -> None:
    chosen = Measurement(candidate("eng2"), 1.0, 3)
    rejected = (("eng1", error), ("eng3", 0.25))
    selection = Selection((Measurement(candidate("eng1"), 0.9, 3), chosen), total_samples=6)
    decision = Decision(
        PROBLEM,
        Policy("race"),
        replace(selection, ranking=selection.ranking[::-1]),
        1e-4,
        rejected,
    )
    choice = Choice(decision, 0, tuning_ms=10.0, searched=selection)
    pick = gpu._pick_of(choice, 12.0)
    assert pick.text == "eng2"
    assert pick.rejected == {"eng1": None, "eng3": 0.25}
    assert decode(Pick, json.loads(json.dumps(encode(pick)))) == pick
