"""Plans, sampling modes and trials that need no GPU; recordings of a timer."""
