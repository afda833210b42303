"""Divisors in the form of the rewrites' kernels; division.cuh divides by them."""

from __future__ import annotations

from cudnn_autotune.engines.recipe import Int64


def divisor(value: int) -> Int64:
    """Returns a divisor from 1 to 2**31 - 1 in the kernels' form.

    ``shift`` is the number of bits of ``value - 1``. A number ``n`` below 2**31 divided by
    ``value`` is ``(n + (n * multiplier >> 32)) >> shift``. See Granlund and Montgomery, "Division
    by Invariant Integers using Multiplication", 1994, figure 4.1.
    """
    shift = (value - 1).bit_length()
    multiplier = (((1 << shift) - value) << 32) // value + 1
    return Int64(value << 32 | multiplier)
