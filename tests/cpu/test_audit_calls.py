"""Audit: the calls that its processes time are the convolutions that they mean."""

from __future__ import annotations

import pytest
import torch

from cudnn_autotune import ConvProblem

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
