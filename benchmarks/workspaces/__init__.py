"""Parts of workspace_place.py: the worker that measures a layer, the report."""
