"""Timers: the interface through which a sampling mode measures a GPU, real or recorded."""
