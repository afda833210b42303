"""Parts of capped.py: the worker that measures a layer, the report."""
