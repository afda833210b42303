"""The random layers of auto_against_pytorch, and how they are measured."""
