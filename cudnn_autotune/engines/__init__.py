"""Convolution problems, and the engine configs and other implementations that can compute them."""
