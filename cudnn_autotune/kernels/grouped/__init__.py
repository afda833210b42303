"""Grouped 2-d convolutions of 4 to 56 channels a group and their gradients, on tensor cores of
compute capability 8.0 or later."""
