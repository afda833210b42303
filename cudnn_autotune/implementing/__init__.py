"""Implementations that users register, and the separate process of their first runs."""
