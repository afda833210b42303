"""The parts of ranks."""
