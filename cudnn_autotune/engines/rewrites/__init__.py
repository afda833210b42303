"""Rewrites: other problems whose solution by cuDNN is that of the one at hand."""
