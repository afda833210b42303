"""The benchmark scripts and their own modules can be imported by these tests."""

import sys

from benchmark_scripts import BENCHMARKS

sys.path.append(str(BENCHMARKS))
