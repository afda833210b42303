"""The calls that call_overhead times, and its tables."""
