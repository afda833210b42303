"""Convolutions with few channels of the input or of the output, such as a model's first, and their
weights' gradients. They need tensor cores of compute capability 8.0 or later."""
