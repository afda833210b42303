"""What audit_layers.py found out, for the README."""
