#!/usr/bin/env python
"""Do the tests that need a GPU pass on this one? Runs tests/gpu and records the outcome.

They are bound by the CPU, which compiles engines and kernels for them. A process for each core, or
one or two more, takes the least time.

    python benchmarks/gpu_tests.py --workers 18 --json benchmarks/results/h200/gpu_tests.json
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from common import arguments, junit
from common.environment import ROOT
from common.record import Record

OUTCOMES = ("passed", "failed", "error", "skipped")


def read(path: Path) -> dict[str, Any]:
    """Counts and seconds of each file, what failed and how, and why tests were skipped."""
    files: dict[str, dict[str, float]] = {}
    reasons: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    for test in junit.read(path):
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
    total = {key: sum(counts[key] for counts in files.values()) for key in (*OUTCOMES, "seconds")}
    for name, counts in {**files, "all": total}.items():
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        table.rows.append((name, *cells, f"{counts['seconds']:.1f}"))
    failures = Table("Failures", ("test", "message"))
    failures.rows += data["results"].get("failures", [])
    return [part for part in (table, failures) if part.rows]


def main() -> int:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument("--log", type=Path, help="write pytest's output here (default: show it)")
    p.add_argument("--tests", default="tests/gpu", help="which tests (%(default)s)")
    p.add_argument(
        "--workers", type=int, default=1, help="processes, by pytest-xdist (%(default)s)"
    )
    options = p.parse_args()
    arguments.check_gpu(__file__)
    with tempfile.TemporaryDirectory() as folder, Record("gpu_tests", options) as record:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [options.tests, f"--junitxml={report}", "--durations=10"]
        if options.workers > 1:
            command += ["-n", str(options.workers), "--dist", "worksteal"]
        log = options.log.open("w") if options.log else None
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log)
        if log is not None:
            log.close()
        if not report.exists():
            print(f"pytest ended with {done.returncode} and left no report", file=sys.stderr)
            return done.returncode or 1
        record.results.update(read(report))
    ran_all = done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    record.end(ran_all, tables)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
