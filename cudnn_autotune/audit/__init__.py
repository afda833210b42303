"""The audit: how far each sampling mode's choices are from the fastest, on this GPU."""
