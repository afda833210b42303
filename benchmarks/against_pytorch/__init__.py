"""What auto_against_pytorch.py draws and measures."""
