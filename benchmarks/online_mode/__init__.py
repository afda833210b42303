"""The parts of online.py, each of which runs in worker processes."""
