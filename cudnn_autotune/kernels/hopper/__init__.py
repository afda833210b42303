"""Convolutions of one dimension, and those with few output channels, by the matrix instruction of a
warpgroup (``wgmma``), which only Hopper GPUs (compute capability 9.0) have."""
