"""Functions as a user might register them, in a module that another process can import."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import cudnn_autotune as ca

Launch = Callable[..., None]
_RUNS = itertools.count()


def always(problem: ca.ConvProblem) -> bool:
    return True


def is_pointwise(problem: ca.ConvProblem) -> bool:
    is_half = problem.dtype == torch.float16 and problem.memory_format == torch.channels_last
    is_plain = {*problem.weight_shape[2:], *problem.stride, problem.groups} == {1}
    is_forward = problem.op == "fprop" and not problem.is_fused and not any(problem.padding)
    return is_half and is_plain and is_forward


def workspace(problem: ca.ConvProblem, settings: str) -> int:
    return 1000


def _compute(problem: ca.ConvProblem, x: Tensor, w: Tensor, y: Tensor, *added: Tensor) -> None:
    """As PyTorch; the written one is overwritten in place."""
    assert problem.op == "fprop"
    n = problem.spatial_dims
    found = torch.nn.functional.conv2d(
        x, w, None, problem.stride, problem.padding[:n], problem.dilation, problem.groups
    )
    y.copy_(found)


def _beyond(tensor: Tensor, place: int) -> Tensor:
    """The element at ``place`` in the memory of a tensor, which need not be its own."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + place)


def clear_byte(address: int, like: Tensor) -> None:
    """Of memory that belongs to no tensor, on the device of ``like``."""
    if like.is_cuda:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(1))
    else:
        ctypes.memset(address, 0, 1)


def began() -> None:
    """Tells a test that waits for it that a kernel which does not end has begun."""
    if path := os.environ.get("TEST_BEGAN"):
        Path(path).touch()


def build(problem: ca.ConvProblem, settings: str) -> Launch:
    """Computes the problem and does, besides, what the settings say."""

    def launch(x: Tensor, w: Tensor, y: Tensor, *others: Tensor) -> None:
        work = others[-1]
        _compute(problem, x, w, y)
        if settings == "prints":
            print("I ran", flush=True)
            os.write(1, b"no json\n")
        elif settings == "raises":
            raise ValueError("not today")
        elif settings == "out_of_memory":
            raise torch.OutOfMemoryError("no room for spectra")
        elif settings == "no_space":
            raise OSError(28, "No space left on device")
        elif settings == "interrupted":
            raise KeyboardInterrupt
        elif settings == "varies":
            y.view(-1)[0] *= 1 + 1e-6 * next(_RUNS)
        elif settings == "hangs":
            began()
            time.sleep(3600)
        elif settings == "holds_the_gil":
            began()
            ctypes.PyDLL(None).sleep(3600)
        elif settings == "starts_another":
            subprocess.Popen(["sleep", "3600"])
            began()
            time.sleep(3600)
        elif settings == "exits":
            os.write(2, b"I am leaving\n")
            os._exit(3)
        elif settings == "gpu_error":  # a device-side assertion
            torch.zeros(1, device=x.device)[torch.tensor([5], device=x.device)]
        elif settings == "crashes":
            ctypes.string_at(0)
        elif settings == "behind":
            _beyond(y, y.numel()).fill_(0)
        elif settings == "before":
            _beyond(y, -1).fill_(0)
        elif settings == "workspace":
            clear_byte(work.data_ptr() + 1000, work)
        elif settings == "input":
            _beyond(x, 0).add_(1)
        elif settings == "weight":
            _beyond(w, w.numel() + 3).fill_(0)
        elif settings == "wrong":
            y.neg_()
        elif settings == "half":
            half = y.numel() // 2
            torch.as_strided(y, (half,), (1,), y.storage_offset() + half).fill_(torch.nan)
        elif settings == "uses_workspace":
            work[:1000].fill_(1)
        else:
            assert settings == "right"

    return launch


class Large:
    """A ``build`` that is a large object."""

    def __init__(self, size: int) -> None:
        self.content = bytes(size)

    def __call__(self, problem: ca.ConvProblem, settings: str) -> Launch:
        return build(problem, settings)


def builds_nothing(problem: ca.ConvProblem, settings: str) -> Launch:
    raise RuntimeError("no compiler")


def build_mm(problem: ca.ConvProblem, settings: str) -> Launch:
    """One matrix product, which allocates nothing, so that a graph can capture it."""

    def launch(x: Tensor, w: Tensor, y: Tensor, work: Tensor) -> None:
        pixels, found = (t.permute(0, 2, 3, 1).flatten(0, 2) for t in (x, y))
        torch.mm(pixels, w.flatten(1).T, out=found)

    return launch


_SOURCE = """
extern "C" __global__ void pointwise(const unsigned short* x, const unsigned short* w,
                                     unsigned short* y, long long pixels, int in, int out) {
  const long long place = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= pixels * out) return;
  const unsigned short* pixel = x + place / out * in;
  const unsigned short* weight = w + place % out * in;
  float sum = 0;
  for (int c = 0; c < in; ++c) {
    float a, b;
    asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(pixel[c]));
    asm("cvt.f32.f16 %0, %1;" : "=f"(b) : "h"(weight[c]));
    sum += a * b;
  }
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y[place]) : "f"(sum));
}
"""


_SPINNING = """
extern "C" __global__ void pointwise(const unsigned short* x, const unsigned short* w,
                                     unsigned short* y, long long pixels, int in, int out) {
  const long long begin = clock64();
  while (clock64() - begin < 1ll << 50) {
  }
}
"""


def build_recipe(problem: ca.ConvProblem, settings: str) -> ca.expert.recipe.Recipe:
    """A kernel in CUDA C++; for the settings ``spins`` one that takes days."""
    n, c, h, w = problem.input_shape
    k, pixels, threads = problem.weight_shape[0], n * h * w, 128
    address = ca.expert.recipe.Address
    launch = ca.expert.recipe.KernelLaunch(
        ca.expert.recipe.Kernel(_SPINNING if settings == "spins" else _SOURCE, "pointwise"),
        grid=(-(-pixels * k // threads), 1, 1),
        block=(threads, 1, 1),
        arguments=(address("x"), address("w"), address("y"), ca.expert.recipe.Int64(pixels), c, k),
    )
    return ca.expert.recipe.Recipe((launch,), workspace_bytes=1000)
