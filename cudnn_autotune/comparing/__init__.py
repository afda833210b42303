"""``compare``: a user's model, run in several ways by PyTorch and by this package, side by side."""
