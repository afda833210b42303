"""The benchmark scripts' common parts: options, records, telemetry, worker processes, and tables.

Nothing here imports torch when it is imported, so that ``--help`` stays fast.
"""
