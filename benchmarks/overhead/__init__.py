"""What call_overhead.py measures, and its tables."""
