"""Batch norms: operands, launches of their kernels, models that have them."""
