"""What audit_layers.py found out, for docs/results."""
