"""The operator ``fold_weights`` on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.conv.references import TOLERANCES, assert_close
from support.models.fold_cases import SHAPES, case

import cudnn_autotune as ca
from cudnn_autotune.compile.weights.operators import fold_weights, laid_out
from cudnn_autotune.engines.problem import strides_of

DTYPES = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]
# Of networks: tiles of some rows, of a row, of some channels of one, and of a part of its window.
LARGE = (
    (256, 256, 3, 3),
    (512, 512, 3, 3),
    (512, 1024, 3, 3),
    (512, 1024, 1, 1),
    (1024, 512, 2, 2),
    (320, 256, 3, 3, 3),
    (64, 128, 5, 5, 5),
    (768, 48, 128),
    (256, 256, 11),
    (64, 48, 1001),
    (64, 3, 7, 7),
    (512, 1, 10),
    (4, 128, 3, 3),
)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize(("weight", "folded"), DTYPES, ids=str)
def test_it_computes_what_the_reference_does(
    weight: torch.dtype, folded: torch.dtype, from_last: bool, channels_last: bool, offset: int
) -> None:
    given = case(
        weight,
        folded,
        from_last=from_last,
        channels_last=channels_last,
        offset=offset,
        device="cuda",
    )
    before = ca.fallbacks()
    found = fold_weights(*given.all)
    assert ca.fallbacks() == before, "the kernel is used"
    for result, right in zip(found, given.expected(), strict=True):
        assert result.dtype == folded
        assert_close(result, right, TOLERANCES[folded])
    for result in found[: len(SHAPES)]:
        assert result.stride() == strides_of(result.shape, channels_last)
    for place, right in given.copies():
        assert torch.equal(found[place], right)


@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
def test_copies_and_their_gradients_are_exact(
    given: torch.dtype, computed: torch.dtype, from_last: bool
) -> None:
    weights = []
    for shape in LARGE:
        memory = torch.empty_strided(
            shape, strides_of(shape, from_last), dtype=given, device="cuda"
        )
        weights.append(torch.nn.Parameter(memory.normal_()))
    copies = laid_out(weights, not from_last, computed)
    gradients = [torch.randn_like(copy) for copy in copies]
    torch.autograd.backward(copies, gradients)
    for weight, copy, gradient in zip(weights, copies, gradients, strict=True):
        assert torch.equal(copy, weight.to(computed))
        assert copy.stride() == gradient.stride() == strides_of(weight.shape, not from_last)
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient.to(given))
        assert weight.grad.stride() == strides_of(weight.shape, from_last)


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
