"""The operator ``fold_weights`` on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.conv.references import TOLERANCES, assert_close
from support.models.fold_cases import SHAPES, case

import cudnn_autotune as ca
from cudnn_autotune.compile.weights.operators import fold_weights
from cudnn_autotune.engines.problem import strides_of


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize(
    ("weight", "folded"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_it_computes_what_the_reference_does(
    weight: torch.dtype, folded: torch.dtype, from_last: bool, channels_last: bool
) -> None:
    given = case(weight, folded, from_last=from_last, channels_last=channels_last, device="cuda")
    before = ca.fallbacks()
    found = fold_weights(*given.all)
    assert ca.fallbacks() == before, "the kernel is used"
    for result, right in zip(found, given.expected(), strict=True):
        assert result.dtype == folded
        assert_close(result, right, TOLERANCES[folded])
    for result in found[: len(SHAPES)]:
        assert result.stride() == strides_of(result.shape, channels_last)


def test_a_captured_call_follows_the_weights() -> None:
    given = case(torch.float16, torch.float16, channels_last=True, device="cuda")
    fold_weights(*given.all)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fold_weights(*given.all)
    for weight in given.weights:
        weight.mul_(2)
    graph.replay()
    for result, right in zip(found, given.expected(), strict=True):
        assert_close(result, right, TOLERANCES[torch.float16])


def test_weights_that_are_not_dense_are_pytorchs() -> None:
    weight = torch.randn(8, 8, 3, 6, device="cuda")[..., ::2]
    (found,) = fold_weights([weight], [], [0], [0.0], torch.float32, True)
    assert torch.equal(found, weight)
    assert found.stride() == strides_of(weight.shape, True)
