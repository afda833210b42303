"""The parts of call_overhead.py: host time of calls, of hits in a full table, and memory."""
