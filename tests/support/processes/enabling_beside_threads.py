"""The first ``enable()`` of a process while other threads run convolutions."""

from __future__ import annotations

CODE = """
import threading, time, torch
import torch.nn.functional as F
import cudnn_autotune as ca

device, count, least_toggles, least_calls = {arguments!r}
if device == "cpu":  # as importing the package does it for CUDA
    torch.set_num_threads(1)
    kernels = ca._C.AtenKernels("CPU")
ca.set_sampling("heuristic")
x, w = torch.randn(2, 8, 9, 9, device=device), torch.randn(8, 8, 3, 3, device=device)
torch.backends.cudnn.allow_tf32 = False
expected = F.conv2d(x, w)
stop, begun, errors, calls = threading.Event(), threading.Barrier(count + 1), [], [0] * count

def run(index):
    leaf = w.clone().requires_grad_()
    begun.wait()
    while not stop.is_set():
        y = F.conv2d(x, leaf)
        torch.autograd.grad(y.sum(), leaf)
        if (y - expected).abs().max().item() > 1e-3:
            errors.append(index)
        calls[index] += 1

threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
for thread in threads:
    thread.start()
begun.wait()
end = time.monotonic() + 60
toggles = 0
while toggles < least_toggles or (min(calls) < least_calls and time.monotonic() < end):
    ca.enable()
    ca.disable()
    toggles += 1
stop.set()
for thread in threads:
    thread.join()
if device == "cuda":
    torch.cuda.synchronize()
print(errors, min(calls) >= least_calls)
"""


def code(device: str, threads: int, least_toggles: int, least_calls: int) -> str:
    """Prints ``[] True`` where every result was right, and each thread made its calls."""
    return CODE.format(arguments=(device, threads, least_toggles, least_calls))
