"""The common cost model of all kernels: the clocks of the busiest multiprocessor.

A multiprocessor runs its blocks in rounds, several at a time. If they are many or large, their
throughput binds it: the tensor cores, the issue of instructions, or memory. Else the latency of a
block binds it, once a round. A kernel's tiling gives the clocks; the constants were fitted to
measured times.
"""

from __future__ import annotations

from cudnn_autotune.engines.implementations import Gpu


def ceil_div(a: int, b: int) -> int:
    """Returns the quotient of positive integers, rounded up."""
    return -(-a // b)


def occupancy(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> int:
    """Returns the resident blocks of a multiprocessor.

    Args:
        threads: threads of a block.
        registers: registers of a thread, allotted in eights.
        shared_bytes: dynamic shared memory of a block.
    """
    whole_warps = ceil_div(threads, 32) * 32
    return min(
        gpu.sm_registers // (whole_warps * ceil_div(registers, 8) * 8),
        gpu.sm_threads // whole_warps,
        gpu.sm_shared_bytes // max(1, shared_bytes + gpu.reserved_shared_bytes),
    )


def busiest_clocks(blocks: float, busy: float, rounds: float, latency: float) -> float:
    """Estimates the clocks of the busiest multiprocessor.

    Args:
        blocks: blocks of that multiprocessor.
        busy: clocks of a block in the unit that binds its throughput.
        rounds: rounds of simultaneous blocks.
        latency: clocks of a block alone on the multiprocessor.
    """
    return max(blocks * busy, rounds * latency)
