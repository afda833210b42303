"""What the benchmark scripts share: the environment record, GPU telemetry, records, workers, plots.

Nothing here imports torch when it is imported, so that ``--help`` and the renderer stay fast.
"""
