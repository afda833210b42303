"""The kernels that Inductor generates, for a GPU that is not there.

The tests look at what a kernel sums and reads, and not at its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile.lowered import H200, Launch, Sum, backward_launches, forward_launches
from support.models.made import ConditionedNorm, Made
from torch import Tensor, nn

from cudnn_autotune.compile import joint_graph, programs

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


def test_a_backward_keeps_its_norm() -> None:
    layers = [nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)]
    launches = backward_launches(nn.Sequential(*layers), torch.empty(4, 8, 16, 16))
    names = [one.operator or "" for one in launches]
    assert sum("batch_norm_act_backward" in name for name in names) == 1


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


def decoder() -> nn.Module:
    """A norm of CogVideoX's decoder, and its causal convolution with the last frames."""

    def forward(model: Any, x: Tensor, latents: Tensor, cache: Tensor) -> Tensor:
        y = model.norm(x, F.interpolate(latents, size=x.shape[2:]))
        output: Tensor = model.conv(torch.cat([cache, y], dim=2))
        return output

    conv = nn.Conv3d(128, 64, 3, padding=(0, 1, 1))
    return Made(forward, norm=ConditionedNorm(16, 128, 3), conv=conv).bfloat16()


SIZES = [(1, 128, 8, 64, 80), (1, 16, 2, 8, 10), (1, 128, 2, 64, 80)]
"""Sizes of the input, the latents and the cache."""


def decoder_launches() -> tuple[list[Launch], list[Launch]]:
    """Returns the kernels of a decoder's norm that write an image of its size or a larger one, and
    the operators that do."""
    last = torch.channels_last_3d
    inputs = [torch.empty(size, dtype=torch.bfloat16).to(memory_format=last) for size in SIZES]
    launches = forward_launches(decoder(), *inputs)
    large = [one for one in launches if one.written_bytes >= inputs[0].nbytes]
    return [one for one in large if not one.operator], [one for one in large if one.operator]


def test_one_kernel_of_a_decoder_s_norm_writes_a_large_image() -> None:
    """The convolution's input, with the frames of the cache."""
    kernels, operators = decoder_launches()
    assert len(kernels) == 1
    assert not operators


@pytest.mark.parametrize(
    ("rewrite", "counts"), [("call_silus", (2, 0)), ("convolve_before_upsampling", (2, 2))]
)
def test_each_rewrite_of_a_decoder_is_needed(
    rewrite: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, rewrite, lambda *_: None)
    kernels, operators = decoder_launches()
    assert (len(kernels), len(operators)) == counts
