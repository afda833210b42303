"""Kernels of our own, a folder for each kind: their CUDA sources, and how each is launched. Beside
the folders is what several of them share."""
