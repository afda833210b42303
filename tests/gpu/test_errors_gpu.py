"""Bad calls raise what nn.Conv2d raises, and want of memory never makes a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cudnn_autotune as ca


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype)


BAD_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "half input": lambda: (on_gpu(2, 4, 9, 8).half(), on_gpu(6, 4, 3, 3)),
    "half weight": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3).half()),
    "half bias": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), on_gpu(6).half()),
    "integers": lambda: (on_gpu(2, 4, 9, 8).int(), on_gpu(6, 4, 3, 3).int()),
    "cpu weight": lambda: (on_gpu(2, 4, 9, 8), torch.ones(6, 4, 3, 3)),
    "cpu input": lambda: (torch.ones(2, 4, 9, 8), on_gpu(6, 4, 3, 3)),
    "cpu bias": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), torch.ones(6)),
    "rank 2": lambda: (on_gpu(9, 8), on_gpu(6, 4, 3, 3)),
    "rank 5": lambda: (on_gpu(1, 2, 4, 9, 8), on_gpu(6, 4, 3, 3)),
    "weight of rank 3": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3)),
    "channels": lambda: (on_gpu(2, 5, 9, 8), on_gpu(6, 4, 3, 3)),
    "groups": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, 0, 1, 2),
    "output channels": lambda: (on_gpu(2, 4, 9, 8), on_gpu(5, 2, 3, 3), None, 1, 0, 1, 2),
    "zero groups": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, 0, 1, 0),
    "kernel too large": lambda: (on_gpu(2, 4, 2, 2), on_gpu(6, 4, 3, 3)),
    "bias size": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), on_gpu(5)),
    "bias rank": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), on_gpu(6, 1)),
    "zero stride": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 0),
    "negative padding": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, -1),
    "zero dilation": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, 0, 0),
    "stride of three": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, (1, 1, 1)),
    "empty stride": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, ()),
    "padding of three": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, (1, 1, 1)),
    "strided same": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 2, "same"),
    "unknown padding": lambda: (on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), None, 1, "full"),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_errors_are_pytorchs(kind: str) -> None:
    errors = []
    for function in (nn.functional.conv2d, ca.functional.conv2d):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
            function(*BAD_CALLS[kind]())
        errors.append((error.type, str(error.value)))
    assert errors[1] == errors[0]
    # And nothing is broken afterwards.
    output = ca.functional.conv2d(on_gpu(2, 4, 9, 8), on_gpu(6, 4, 3, 3), sampling="heuristic")
    assert torch.equal(output.cpu(), torch.full((2, 6, 7, 6), 36.0))


@pytest.mark.parametrize("op", ["conv_dgrad", "conv_wgrad"])
def test_gradients_of_another_size_are_refused(op: str) -> None:
    grad_output = on_gpu(2, 6, 7, 6)
    other, size = (
        (on_gpu(6, 4, 3, 3), [2, 4, 29, 28])
        if op == "conv_dgrad"
        else (on_gpu(2, 4, 9, 8), [6, 4, 5, 5])
    )
    with pytest.raises((RuntimeError, ValueError), match="grad_output"):
        getattr(torch.ops.cudnn_autotune, op)(grad_output, other, size, [1, 1], [0, 0], [1, 1], 1)
