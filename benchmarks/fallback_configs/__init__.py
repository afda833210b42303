"""The parts of fallback_mode.py: what is timed on a layer, on which GPU, and the report."""
