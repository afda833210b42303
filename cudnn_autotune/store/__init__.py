"""Decisions on disk, for many processes and machines."""
