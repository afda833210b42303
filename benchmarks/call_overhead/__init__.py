"""What call_overhead measures, and its tables."""
