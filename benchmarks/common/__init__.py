"""What the benchmark scripts share: options, records, telemetry, worker processes, tables, plots.

Nothing here imports torch when it is imported, so that ``--help`` stays fast.
"""
