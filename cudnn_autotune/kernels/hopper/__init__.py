"""Convolutions of one dimension, and convolutions with few output channels, by the matrix
instruction of a warpgroup (``wgmma``). Only Hopper GPUs (compute capability 9.0) have it."""
