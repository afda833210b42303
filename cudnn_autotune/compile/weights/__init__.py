"""Weights of convolutions in a layout, with folded batch norms, computed at each call of a
program."""
