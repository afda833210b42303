"""Depthwise convolutions and their gradients, on CUDA cores of any GPU, and on tensor cores from
compute capability 8.0 on."""
