"""Batch, instance and group norms: choices, operators and kernels."""
