"""The first gradient of a norm without parameters in a process, on a GPU; a program of its own.

Prints the largest relative error to float64, and why the package's kernels were rejected, if so.
Argument: ``pytorch`` or ``package``.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import cudnn_autotune as ca


def main(by: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16, 16, device="cuda", requires_grad=True)
    grad_output = torch.randn_like(x)
    if by == "package":
        ca.enable()
    (found,) = torch.autograd.grad(F.batch_norm(x, None, None, training=True), x, grad_output)
    ca.disable()
    exact = x.detach().double().requires_grad_()
    output = F.batch_norm(exact, None, None, training=True)
    (expected,) = torch.autograd.grad(output, exact, grad_output.double())
    print(float((found - expected).norm() / expected.norm()))
    print(*(f"{form} {why}" for one in ca.norm_choices() for form, why in one.rejected.items()))


if __name__ == "__main__":
    main(sys.argv[1])
