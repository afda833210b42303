"""What `_C` was built with. The build writes the module (building/command.py)."""

TORCH_VERSION: str
CUDA_VERSION: str | None  # None: built with a CPU-only torch, so without the search
CXX11_ABI: bool
