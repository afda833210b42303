"""Batch norms by statistics of the batch, with what follows them: operators and their kernels."""
