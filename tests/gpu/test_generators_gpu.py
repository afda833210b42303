"""Generators of random numbers are afterwards what they were, on all GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn.untouched import cuda_devices
from cudnn_autotune.timers import peaks

pytestmark = pytest.mark.long


def states() -> list[object]:
    """The state of each generator: Python's, NumPy's, the CPU's, and one a GPU."""
    torch.cuda.init()
    of_gpus = [one.get_state() for one in torch.cuda.default_generators]
    tensors = [torch.get_rng_state(), *of_gpus]
    return [random.getstate(), np.random.get_state()[2], *(t.tolist() for t in tensors)]


def model(*others: nn.Module) -> nn.Sequential:
    conv = nn.Conv2d(16, 32, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(32), nn.ReLU(), *others).cuda().half()


def image() -> Tensor:
    data = torch.linspace(-1, 1, 4 * 16 * 32 * 32, device="cuda", dtype=torch.float16)
    return data.view(4, 16, 32, 32)


def inference(net: nn.Module, **options: object) -> None:
    compiled = torch.compile(net.eval(), backend="cudnn_autotune", options=options)
    with torch.no_grad():
        compiled(image())
    assert ca.compilations()[-1].times_ms


def training(net: nn.Module) -> None:
    torch.compile(net, backend="cudnn_autotune")(image()).float().sum().backward()


def changed_weights(net: nn.Sequential) -> None:
    compiled = torch.compile(
        net.eval(), backend="cudnn_autotune", options={"freezing": True, "max_autotune": True}
    )
    for _ in range(3):
        with torch.no_grad():
            compiled(image())
            net[0].bias.add_(1)  # type: ignore[operator, union-attr]


PROBLEM = ConvProblem("fprop", (2, 16, 12, 12), (16, 16, 3, 3), padding=(1, 1), dtype=torch.float16)


def measured(_: nn.Module) -> None:
    texts = [one.text for one in ca.expert.candidates(PROBLEM)[:2]]
    ca.expert.measure(PROBLEM, texts, rounds=2, target_ms=1.0)


WAYS: dict[str, Callable[[Any], object]] = {
    "inference": inference,
    "always": partial(inference, fuse="always"),
    "layout": partial(inference, memory_format="auto"),
    "freezing": partial(inference, freezing=True),
    "max-autotune": partial(inference, max_autotune=True),
    "changed weights": changed_weights,
    "training": training,
    "convert": lambda net: ca.convert(net, memory_format="auto", example_input=image()),
    "convert, trained": lambda net: ca.convert(net)(image()).float().sum().backward(),
    "tune": lambda net: ca.tune(ca.convert(net.eval()), image()),
    "measure": measured,
    "peaks": lambda _: peaks.measure(),
}


@pytest.mark.parametrize("device", [0, pytest.param(1, id="second GPU")])
@pytest.mark.parametrize("way", WAYS)
def test_no_generator_moves(way: str, device: int) -> None:
    if device >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    torch._dynamo.reset()
    with torch.cuda.device(device):
        torch.cuda.manual_seed_all(1234)
        net = model()
        before = states()
        WAYS[way](net)
        torch.cuda.synchronize()
        assert states() == before


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("device", [0, pytest.param(1, id="second GPU")])
def test_a_model_that_draws_moves_its_own_generator_only(device: int, train: bool) -> None:
    """It moves as without this backend."""
    if device >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    with torch.cuda.device(device):
        net = model(nn.Dropout(0.3)).train(train)
        net[-1].train()
        x, found = image(), []
        assert cuda_devices([x]) == {device}
        for backend in ("inductor", "cudnn_autotune"):
            torch._dynamo.reset()
            torch.cuda.manual_seed_all(1234)
            torch.manual_seed(7)
            compiled = torch.compile(net, backend=backend)
            with torch.set_grad_enabled(train):
                compiled(x)
            found.append(states())
    assert found[0] == found[1]
