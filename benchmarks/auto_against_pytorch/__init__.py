"""The random layers of auto_against_pytorch, and their measurement."""
