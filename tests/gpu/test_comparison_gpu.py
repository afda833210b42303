"""What a deep network makes of rounding is no reason to refuse a program of it."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from support.models.deep_network import IMAGES, deep_network, distance, with_folded_norms
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import compiled_graph
from cudnn_autotune.compile.comparison import compare, convolutions_ms

pytestmark = pytest.mark.long


@pytest.fixture
def deep() -> nn.Sequential:
    """In float16 two correct programs of it differ by more than the tolerance of 2 %."""
    return deep_network(20).cuda().half().to(memory_format=torch.channels_last)


@pytest.fixture
def images() -> Tensor:
    return IMAGES.cuda().half().to(memory_format=torch.channels_last)


def test_the_time_of_convolutions() -> None:
    x = torch.randn(8, 64, 4096, device="cuda", dtype=torch.float16)
    conv = nn.Conv1d(64, 64, 7, padding=3).cuda().half()
    state = torch.cuda.get_rng_state()
    one_ms = convolutions_ms(conv, [x])
    assert 0 < one_ms < 50
    assert convolutions_ms(nn.Sequential(conv, nn.Dropout(), nn.GELU(), conv), [x]) > one_ms / 2
    assert convolutions_ms(torch.relu, [x]) == 0
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_folded_batch_norms_are_accepted(deep: nn.Sequential, images: Tensor) -> None:
    folded = with_folded_norms(deep)
    with torch.no_grad():
        assert distance(deep(images), folded(images)) > 0.02
    assert not compare({"reference": deep, "folded": folded}, [images]).wrong


def test_a_flaw_in_the_first_block_is_found(deep: nn.Sequential, images: Tensor) -> None:
    wrong = copy.deepcopy(deep)
    wrong[0].flaw = "no residual"
    found = compare({"reference": deep, "wrong": wrong}, [images])
    assert re.search(r"relative error of .*, allowed is .* \(noise", found.wrong["wrong"])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_programs_are_accepted(
    mode: str, deep: nn.Sequential, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with CUDA graphs get the perturbed inputs as well."""
    torch.compiler.reset()
    # However fast its groups are, it is compared with Inductor's program.
    monkeypatch.setattr(compiled_graph, "_CLEAR_GAIN", math.inf)
    kept = images.clone()
    with torch.no_grad():
        torch.compile(deep, backend="cudnn_autotune", mode=mode)(images)
    record = ca.compilations()[-1]
    assert set(record.times_ms) == {"inductor", "cudnn_autotune"}, record.note
    assert torch.equal(images, kept)


def test_both_layouts_are_timed(deep: nn.Sequential, images: Tensor) -> None:
    ca.convert(deep, sampling="heuristic", memory_format="auto", example_input=images)
    choice = ca.conversion(deep).memory_format
    assert len(choice.times_ms) == 2, choice.reason
