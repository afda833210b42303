"""What `_C` was built with. setup.py writes the module, at build time."""

TORCH_VERSION: str
CUDA_VERSION: str | None  # None: built with a CPU-only torch, so without the search
CXX11_ABI: bool
