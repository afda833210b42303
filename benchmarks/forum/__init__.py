"""The parts of forum_repro.py: the worker, and what its record says."""
