"""The parts of ranks.py."""
