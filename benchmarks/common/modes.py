"""The compared modes: this package's, and PyTorch's."""

from __future__ import annotations

# Benchmark flag and benchmark_limit (0: every plan that the heuristics list) of PyTorch's modes.
TORCH_MODES = {
    "pytorch_off": (False, 10),
    "pytorch_on_10": (True, 10),
    "pytorch_on_0": (True, 0),
}
OUR_MODES = (
    "heuristic",
    "sample_once",
    "median_of_three",
    "till_stable",
    "race",
    "sustained",
    "auto",
)


def set_torch_mode(mode: str) -> None:
    """Sets PyTorch's flags. The process must be fresh: PyTorch never tunes a shape again."""
    import torch

    benchmark, limit = TORCH_MODES[mode]
    torch.backends.cudnn.benchmark = benchmark
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark_limit = limit


def synchronize(device: str) -> None:
    """Waits for the GPU, where ``device`` is one."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
