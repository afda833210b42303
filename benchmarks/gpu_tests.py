#!/usr/bin/env python
"""Do the tests that need a GPU pass on this one? Runs tests/gpu and records the outcome.

python benchmarks/gpu_tests.py --json benchmarks/results/h200/gpu_tests.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

from common import ending
from common.environment import ROOT
from suite.report import plot, tables


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, help="write the record here")
    p.add_argument("--plot", type=Path, help="draw the record here (.png, .svg)")
    p.add_argument("--log", type=Path, help="write pytest's output here (default: show it)")
    p.add_argument("--tests", default="tests/gpu", help="which tests (%(default)s)")
    return p


def read(junit: Path) -> dict[str, object]:
    """Counts and seconds of each file, and why tests were skipped."""
    files: dict[str, dict[str, float]] = defaultdict(
        lambda: {"passed": 0, "failed": 0, "error": 0, "skipped": 0, "seconds": 0.0}
    )
    reasons: dict[str, int] = defaultdict(int)
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        counts = files[case.get("classname", "").rpartition(".")[2]]
        counts["seconds"] += float(case.get("time", 0))
        failed, skipped = case.find("failure"), case.find("skipped")
        if failed is not None:
            counts["failed"] += 1
        elif case.find("error") is not None:
            counts["error"] += 1
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
        else:
            counts["passed"] += 1
    return {
        "files": dict(sorted(files.items())),
        "skip_reasons": [f"{count} x {reason}" for reason, count in sorted(reasons.items())],
    }


def main() -> int:
    options = parser().parse_args()
    import torch
    from common.record import Record
    from common.telemetry import Telemetry

    if not torch.cuda.is_available():
        print("gpu_tests.py needs a CUDA GPU: elsewhere, run pytest itself", file=sys.stderr)
        return 2
    record = Record("gpu_tests", options.json, device="cuda", arguments=vars(options))
    with tempfile.TemporaryDirectory() as folder, Telemetry(period_s=0.25) as telemetry:
        junit = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [options.tests, f"--junitxml={junit}", "--durations=10"]
        log = options.log.open("w") if options.log else None
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log)
        if log is not None:
            log.close()
        if not junit.exists():
            print(f"pytest ended with {done.returncode} and left no report", file=sys.stderr)
            return done.returncode or 1
        record.results.update(read(junit))
    record.save(complete=done.returncode == 0, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
