"""Recordings of what a GPU did, and the timer that plays them back where there is none."""
