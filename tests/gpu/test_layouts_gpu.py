"""Outputs and gradients have the strides of PyTorch's on the GPU, also where a size of 1 leaves
them open: by the layers' functions and while enabled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.conv import odd_layouts

import cudnn_autotune as ca

CASES = 150


@pytest.fixture(autouse=True)
def heuristic(cudnn_flags: Callable[..., None]) -> Iterator[None]:
    """Nothing is searched: the engine has no part in the layout."""
    ca.set_sampling("heuristic")
    cudnn_flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False)
    yield
    ca.disable()


@pytest.mark.parametrize("way", ["functions", "enable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_strides_are_pytorchs(way: str, dtype: torch.dtype, seed: int) -> None:
    differ = {}
    tolerance = 2e-2 if dtype == torch.float16 else 1e-3
    for case in odd_layouts.draw(CASES, seed):
        case = case.to("cuda", dtype)
        output, gradients = case.step()
        if way == "enable":
            with ca.enable("heuristic"):
                found, found_gradients = case.step()
        else:
            found, found_gradients = case.step(ca.functional)
        theirs, ours = [output, *gradients], [found, *found_gradients]
        expected = [tensor.stride() for tensor in theirs]
        strides = [tensor.stride() for tensor in ours]
        if strides != expected:
            differ[case.name] = (strides, expected)
        for one, other in zip(ours, theirs, strict=True):
            error = (one.double() - other.double()).abs().max().item()
            assert error <= tolerance * max(1.0, other.double().abs().max().item()), case.name
    lines = "\n".join(f"{name}: {found}" for name, found in differ.items())
    assert not differ, f"{len(differ)} of {CASES}:\n{lines}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_without_gradients_and_in_inference_mode(dtype: torch.dtype) -> None:
    differ = {}
    for mode in (torch.no_grad, torch.inference_mode):
        for case in odd_layouts.draw(CASES, seed=2):
            case = case.to("cuda", dtype)
            with mode():
                arguments = (case.input, case.weight, case.bias)
                theirs = getattr(torch.nn.functional, case.function)(*arguments, **case.keywords)
                ours = getattr(ca.functional, case.function)(*arguments, **case.keywords)
            if ours.stride() != theirs.stride():
                differ[case.name] = (ours.stride(), theirs.stride())
    lines = "\n".join(f"{name}: {found}" for name, found in differ.items())
    assert not differ, f"{len(differ)}:\n{lines}"


def test_the_written_down_steps_are_pytorchs() -> None:
    """What tests/cpu/nn/test_gradient_layouts.py expects is what PyTorch does here."""
    differ = {}
    for case in odd_layouts.draw(CASES, seed=3):
        case = case.to("cuda", torch.float32)
        output, gradients = case.step()
        of_output, of_input, of_weight = odd_layouts.strides_on_cuda(
            case.to("cpu", torch.float32), output.shape
        )
        wanted = zip((of_input, of_weight), case.wanted, strict=True)
        expected = [of_output, *(strides for strides, is_wanted in wanted if is_wanted)]
        found = [t.stride() for t in (output, *gradients)][: len(expected)]
        if found != expected:
            differ[case.name] = (found, expected)
    lines = "\n".join(f"{name}: {found}" for name, found in differ.items())
    assert not differ, f"{len(differ)}:\n{lines}"
