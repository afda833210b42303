"""Weights of convolutions that a compiled program lays out, and folds batch norms into, at each
call."""
