#!/usr/bin/env python
"""Do the tests that need a GPU pass on this one? Runs tests/gpu and records the outcome.

They are bound by the CPU, which compiles engines and kernels for them. A process for each core, or
one or two more, takes the least time. Those that measure the GPU come last, in one process.

    python benchmarks/gpu_tests.py --workers 18 --json benchmarks/results/h200/gpu_tests.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from common import arguments, junit
from common.environment import ROOT
from common.record import Record

OUTCOMES = ("passed", "failed", "error", "skipped")
_TOO_LONG_S = 150  # of one test, after which pytest shows where it is


def summed(tests: Iterable[junit.Test]) -> dict[str, Any]:
    """Counts and seconds of each file, what failed and how, and why tests were skipped."""
    files: dict[str, dict[str, float]] = {}
    reasons: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    for test in tests:
        counts = files.setdefault(test.group, {**dict.fromkeys(OUTCOMES, 0), "seconds": 0.0})
        counts["seconds"] += test.seconds
        outcome = "skipped" if test.outcome == "xfailed" else test.outcome
        counts[outcome] += 1
        if outcome in ("failed", "error"):
            failures.append((f"{test.group}::{test.name}", test.message))
        elif outcome == "skipped":
            reasons[test.message] += 1
    return {
        "files": dict(sorted(files.items())),
        "failures": sorted(failures),
        "skip_reasons": [f"{count} x {reason}" for reason, count in sorted(reasons.items())],
    }


def tables(data: dict[str, Any]) -> list[Any]:
    from common.tables import Table

    files = data["results"]["files"]
    table = Table("GPU tests, file by file", ("file", *OUTCOMES, "seconds"))
    if reasons := data["results"]["skip_reasons"]:
        table.note = "Skipped: " + "; ".join(reasons)
    if not data["complete"]:
        table.note = f"The time was over before all tests had run. {table.note}".rstrip()
    total = {key: sum(counts[key] for counts in files.values()) for key in (*OUTCOMES, "seconds")}
    for name, counts in {**files, "all": total}.items():
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        table.rows.append((name, *cells, f"{counts['seconds']:.1f}"))
    failures = Table("Failures", ("test", "message"))
    failures.rows += data["results"].get("failures", [])
    return [part for part in (table, failures) if part.rows]


def main() -> int:
    p = arguments.parser(__doc__, has_dry_run=False)
    junit.add_options(p)
    p.add_argument(
        "--tests", nargs="+", default=["tests/gpu"], help="folders or files (%(default)s)"
    )
    options = p.parse_args()
    arguments.check_gpu(__file__)
    with Record("gpu_tests", options) as record:
        codes: list[int] = []
        tests: list[junit.Test] = []
        begin = time.monotonic()
        for marked, workers in (("not alone", options.workers), ("alone", 1)):
            command = [*options.tests, "--durations=10", "-m", marked]
            command += ["-o", f"faulthandler_timeout={_TOO_LONG_S}"]
            left = options.time_limit and begin + options.time_limit - time.monotonic()
            one = argparse.Namespace(**vars(options) | {"workers": workers, "time_limit": left})
            code, found = junit.run(command, one, cwd=ROOT)
            codes.append(code)
            tests += found
            record.results.update(summed(tests))
            record.save()
            if code == pytest.ExitCode.INTERRUPTED:
                break
    passed, none = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED
    bad = [code for code in codes if code not in (passed, none)]
    record.end(all(code == pytest.ExitCode.TESTS_FAILED for code in bad), tables)
    return bad[0] if bad else min(codes)


if __name__ == "__main__":
    sys.exit(main())
