"""Parts of store.py."""
