"""The parts of compare_sampling.py: backends, worker tasks, schedule, analysis and report."""
