"""Counts that change a while after their cause: CUDA may release later what a graph owned."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch


def settled(count: Callable[[], int]) -> int:
    """The count once nothing of earlier work changes it any more."""
    gc.collect()
    torch.cuda.synchronize()
    found, since = count(), time.monotonic()
    while time.monotonic() < since + 0.05:
        if (now := count()) != found:
            found, since = now, time.monotonic()
    return found


def comes_to(count: Callable[[], int], expected: int) -> bool:
    """Whether the count soon has this value."""
    gc.collect()
    end = time.monotonic() + 10
    while count() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return count() == expected
