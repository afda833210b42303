"""Batch, instance and group norms: what computes each, its operators and kernels."""
