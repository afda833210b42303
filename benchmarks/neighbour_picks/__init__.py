"""The parts of neighbours.py."""
