"""Weights of convolutions: their layout and folded batch norms, computed by a compiled program at
each call."""
