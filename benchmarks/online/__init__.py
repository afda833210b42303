"""The parts of online, each of which runs in worker processes."""
