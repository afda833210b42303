"""Kernels of our own: their CUDA sources, and how each is launched."""
