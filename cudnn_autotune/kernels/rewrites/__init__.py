"""Rewrites: other problems whose solution, by cuDNN or our kernels, is that of the one at hand, and
products of spectra by PyTorch."""
