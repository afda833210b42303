"""The parts of call_overhead.py: host time of calls, and memory."""
