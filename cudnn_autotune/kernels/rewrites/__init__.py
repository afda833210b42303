"""Rewrites: other problems with the same solution, by cuDNN or our kernels, and products of spectra
by PyTorch."""
