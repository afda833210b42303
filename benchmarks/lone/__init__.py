"""Parts of lone_layer.py: the model and its watched layers, lone runs, the worker, the report."""
