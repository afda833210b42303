"""The parts of models."""
