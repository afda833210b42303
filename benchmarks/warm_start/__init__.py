"""The parts of warm_start."""
