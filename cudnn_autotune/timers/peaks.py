"""Measured peaks of a GPU: the bandwidth of its DRAM, its arithmetic, and its launches.

Each is the least time of some batches of launches: disturbances and a rising clock only make a GPU
slower. All batches together take some 0.3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune.engines.problem import DTYPES_BY_NAME
from cudnn_autotune.engines.roofline import TF32, Peaks
from cudnn_autotune.timers.stopwatch import Stopwatch

# A batch is long beside the events around it, and short beside the time in which a board throttles.
_BATCH_MS = 4.0
_BATCHES = 5
# The L2 cache keeps little of a tensor this many times its size for the next pass over it.
_L2_MULTIPLE = 8
_LEAST_BYTES = 256 << 20
# Milliseconds from which a product of square matrices fills every GPU; smaller ones grow.
_PRODUCT_MS = 1.0
_SIDES = (1024, 2048, 4096, 8192)
_MEMORY_SHARE = 0.5  # largest share of the free memory that is used
_AMPERE = (8, 0)  # the first with tensor cores for bfloat16 and TF32
_KERNELS = 200

Call = Callable[[], object]


def measure(device: torch.device | int | str = "cuda") -> Peaks:
    """Measures the peaks of a CUDA device, which should have nothing else to do.

    It takes up to half of the free memory and gives it back. Other threads must not set PyTorch's
    precision of matrix products until it returns.

    Raises:
        RuntimeError: too little memory is free, or CUDA failed.
    """
    with torch.no_grad(), torch.cuda.device(device):
        torch.cuda.synchronize()
        try:
            return Peaks(
                bytes_per_ms=_bandwidth(),
                flops_per_ms={name: _arithmetic(name) for name in _arithmetics()},
                launch_ms=_launch_ms(),
            )
        finally:
            torch.cuda.empty_cache()


def _bandwidth() -> float:
    """Returns DRAM's bytes in a millisecond, in the fastest of reading, copying and adding (two
    reads, one write). The memory decides which is the fastest."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    enough = _L2_MULTIPLE * gpu.L2_cache_size
    free = _MEMORY_SHARE * torch.cuda.mem_get_info()[0]
    size = int(min(max(_LEAST_BYTES, enough), free / 3))
    if size < enough:
        raise RuntimeError(
            f"measuring the bandwidth needs {3 * enough / _MEMORY_SHARE / 2**20:.0f} MiB of free "
            f"memory, {free / _MEMORY_SHARE / 2**20:.0f} MiB are free"
        )
    # Zeros would draw less power than data do, and might be compressed.
    a, b = _random(size // 4)
    c = torch.empty_like(a)
    return max(
        a.nbytes / _least_ms(lambda: a.sum()),
        2 * a.nbytes / _least_ms(lambda: c.copy_(a)),
        3 * a.nbytes / _least_ms(lambda: torch.add(a, b, out=c)),
    )


def _random(*shape: int) -> list[Tensor]:
    """Returns two tensors of random numbers, without the caller's generator."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda") for _ in range(2)]


def _arithmetics() -> list[str]:
    """Returns the names of the arithmetics that the GPU has units for."""
    has_all = torch.cuda.get_device_capability() >= _AMPERE
    return ["float16", *(["bfloat16", TF32] if has_all else []), "float32", "float64"]


def _arithmetic(name: str) -> float:
    """Returns the operations of a large matrix product in a millisecond."""
    dtype = DTYPES_BY_NAME.get(name, torch.float32)
    free = _MEMORY_SHARE * torch.cuda.mem_get_info()[0]
    sides = [side for side in _SIDES if 3 * side**2 * dtype.itemsize <= free]
    with _precision("tf32" if name == TF32 else "ieee"):
        for side in sides:
            a, b = (tensor.to(dtype) for tensor in _random(side, side))
            product = partial(torch.mm, a, b, out=torch.empty_like(a))
            product()  # loads the kernel
            if side == sides[-1] or _batch_ms(product, 1) >= _PRODUCT_MS:
                return 2 * side**3 / _least_ms(product)
    raise RuntimeError(f"measuring {name} needs more memory than {free / 2**20:.0f} MiB")


@contextmanager
def _precision(wanted: str) -> Iterator[None]:
    """Sets the precision of float32 products, ``tf32`` or ``ieee``."""
    # Through torch._C: torch.backends refuses where the caller has used both of its interfaces.
    before = torch._C._get_fp32_precision_getter("cuda", "matmul")
    torch._C._set_fp32_precision_setter("cuda", "matmul", wanted)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter("cuda", "matmul", before)


def _launch_ms() -> float:
    """Returns the milliseconds from one tiny kernel's start to the next one's, in a CUDA graph,
    where no kernel waits for the host."""
    one = torch.zeros(1, device="cuda")
    one.add_(1)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    # torch's own stream for captures is of the device that was current when it was first used.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(_KERNELS):
            one.add_(1)
    return _least_ms(graph.replay) / _KERNELS


def _least_ms(call: Call) -> float:
    """Returns the milliseconds of a call in the fastest batch."""
    call()
    calls = max(1, round(_BATCH_MS / max(_batch_ms(call, 1), 1e-3)))
    return min(_batch_ms(call, calls) for _ in range(_BATCHES))


def _batch_ms(call: Call, calls: int) -> float:
    """Returns the milliseconds of a call in a batch."""
    with Stopwatch() as watch:
        for _ in range(calls):
            call()
    return watch.ms() / calls
