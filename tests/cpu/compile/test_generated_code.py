"""The kernels that Inductor generates for a backward, on a GPU that is not there.

The tests look at what a kernel sums and reads, and not at its text.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compile.lowered import H200, Launch, Sum, backward_launches
from torch import Tensor, nn

from cudnn_autotune.compile import joint_graph

pytest.importorskip(
    "triton", reason="Inductor generates Triton code, for which torch has no Triton"
)
pytestmark = pytest.mark.search

# Elements from which a sum is worth many blocks.
LARGE = 2**18
# A block of a sum across the memory takes at least this many outputs, neighbours in memory.
NEIGHBOURS = 8


def sounds() -> tuple[nn.Module, Tensor]:
    """Half a block of Conv-TasNet, whose memory is that of images of height 1 in channels_last."""
    layers = [nn.Conv1d(128, 512, 1), nn.PReLU(), nn.GroupNorm(1, 512), nn.Conv1d(512, 128, 1)]
    return nn.Sequential(*layers).bfloat16(), torch.empty(4, 128, 8000, dtype=torch.bfloat16)


def images() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(64, 128, 1), nn.PReLU(), nn.GroupNorm(1, 128)]
    return nn.Sequential(*layers, nn.Conv2d(128, 64, 3, padding=1)), torch.empty(4, 64, 60, 60)


MODELS = {"1d": sounds, "2d": images}


def sums_of_biases(launches: list[Launch]) -> list[list[tuple[Launch, Sum]]]:
    """Returns, for each convolution, the sums that read its output gradient, with their kernels."""
    gradients = [one.reads for one in launches if "conv_wgrad" in (one.operator or "")]
    return [
        [
            (launch, one)
            for launch in launches
            for one in launch.sums
            if any(read.buffer in gradient for read in one.reads)
        ]
        for gradient in gradients
    ]


def divides_sums_of_biases(launches: list[Launch]) -> bool:
    """Returns whether each convolution's bias has a kernel that sums its gradient, and does nothing
    else, in a block for each multiprocessor at least."""
    found = sums_of_biases(launches)
    return all(
        len(sums) == 1
        and len(sums[0][0].writes) == 1
        and sums[0][1].outputs >= NEIGHBOURS * H200.multi_processor_count
        for sums in found
    )


def sums_along_memory(launches: list[Launch]) -> bool:
    """Returns whether each large sum reads neighbours in memory at a time."""
    large = [one for at in launches for one in at.sums if one.outputs * one.steps >= LARGE]
    return all(read.along_steps or read.along_outputs for one in large for read in one.reads)


@pytest.mark.parametrize("model", MODELS)
def test_sums_of_a_backward(model: str) -> None:
    launches = backward_launches(*MODELS[model]())
    assert len(sums_of_biases(launches)) == 2
    assert divides_sums_of_biases(launches)
    assert sums_along_memory(launches)


@pytest.mark.parametrize(
    ("rewrite", "property"),
    [("realize_for_biases", divides_sums_of_biases), ("sum_in_memory_order", sums_along_memory)],
)
@pytest.mark.parametrize("model", MODELS)
def test_each_rewrite_is_needed(
    model: str,
    rewrite: str,
    property: Callable[[list[Launch]], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the kernels lack the property."""
    monkeypatch.setattr(joint_graph, rewrite, lambda _: None)
    launches = backward_launches(*MODELS[model]())
    assert not property(launches)
