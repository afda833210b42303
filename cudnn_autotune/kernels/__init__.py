"""Kernels of our own, a folder for each kind: their CUDA sources and launches. The files beside the
folders are common to several kinds."""
