"""Parts of make_layers.py: the networks, a file for each family."""
