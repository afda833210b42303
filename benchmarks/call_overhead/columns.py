"""Names of what takes turns in call_overhead, beside ours and PyTorch's."""

from __future__ import annotations

ENABLE = "enable()"
"""Name of the calls of PyTorch's module that are timed while ``cudnn_autotune.enable`` is in force,
which it is in none of the other blocks."""
BY_KERNELS = "ours, by kernels"
"""Name of the calls of our norm that our kernels compute, whatever is chosen."""
