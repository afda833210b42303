"""The first ``enable()`` of a process while other threads run convolutions."""

from __future__ import annotations

import pytest
from subprocesses import evaluate

pytestmark = pytest.mark.gpu

CODE = """
import threading, time, torch
import torch.nn.functional as F
import cudnn_autotune as ca

ca.set_sampling("heuristic")
x, w = torch.randn(2, 8, 9, 9, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda")
torch.backends.cudnn.allow_tf32 = False
expected = F.conv2d(x, w)
stop, begun, errors, calls = threading.Event(), threading.Barrier(9), [], [0] * 8

def run(index):
    leaf = w.clone().requires_grad_()
    begun.wait()
    while not stop.is_set():
        y = F.conv2d(x, leaf)
        torch.autograd.grad(y.sum(), leaf)
        if (y - expected).abs().max().item() > 1e-3:
            errors.append(index)
        calls[index] += 1

threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
begun.wait()
end = time.monotonic() + 60
toggles = 0
while toggles < 2000 or (min(calls) == 0 and time.monotonic() < end):
    ca.enable()
    ca.disable()
    toggles += 1
stop.set()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
print(errors, min(calls) > 0)
"""


def test_the_first_enable_beside_running_convolutions() -> None:
    assert evaluate(CODE) == "[] True"
