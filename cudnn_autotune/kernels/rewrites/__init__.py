"""Rewrites: other problems with the same solution, and products of spectra by PyTorch."""
