"""Implementations that users register, and the process in which each runs first."""
