"""The benchmark scripts and their own modules can be imported by these tests."""

import sys

from support.processes.benchmark_scripts import BENCHMARKS

sys.path.append(str(BENCHMARKS))
