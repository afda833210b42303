"""Tuning of a problem that misses the plan cache: look it up, else search, check and remember."""
