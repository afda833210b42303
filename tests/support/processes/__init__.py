"""Other processes: Python, the command, scripts of benchmarks, ranks, programs of C++."""
