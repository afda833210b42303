"""The parts of models.py."""
