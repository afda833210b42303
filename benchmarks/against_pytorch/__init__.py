"""The random layers of auto_against_pytorch.py, and how they are measured."""
