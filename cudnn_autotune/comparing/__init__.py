"""``compare``: a user's model by PyTorch and by this package in several ways, side by side."""
