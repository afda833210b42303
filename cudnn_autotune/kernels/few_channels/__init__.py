"""Convolutions with few channels of the input, such as a model's first, or of the output, and
gradients of their weights, on tensor cores from compute capability 8.0 on."""
