"""What the benchmark scripts share: options, records, telemetry, worker processes, and tables.

Nothing here imports torch when it is imported, so that ``--help`` stays fast.
"""
