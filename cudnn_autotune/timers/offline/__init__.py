"""Timers that need no GPU (``sampling.Timer``): one computes what a GPU would do, the other plays
back what a GPU did; and the recordings that it plays."""
