"""Convolutions: problems, arguments, and what PyTorch makes of them."""
