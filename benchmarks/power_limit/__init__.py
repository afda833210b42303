"""Parts of board_power.py: the worker that measures a layer, the analysis, the report."""
