"""The parts of online.py."""
