"""The cost model that all kernels share: the clocks of the busiest multiprocessor.

A multiprocessor runs its blocks in rounds, several at a time. Their throughput binds it if they are
many or large: the tensor cores, the issue of instructions, or memory. Else the latency of a block
binds it, once a round. A kernel's tiling says how many clocks these are; the constants were fitted
to measured times.
"""

from __future__ import annotations

from cudnn_autotune.engines.implementations import Gpu


def ceil_div(a: int, b: int) -> int:
    """Returns the quotient of positive integers, rounded up."""
    return -(-a // b)


def occupancy(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> int:
    """Returns the blocks that a multiprocessor holds at a time.

    Args:
        threads: threads of a block.
        registers: registers of a thread, which are allotted in eights.
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
        rounds: rounds of blocks that run at a time.
        latency: clocks of a block that has the multiprocessor for itself.
    """
    return max(blocks * busy, rounds * latency)
