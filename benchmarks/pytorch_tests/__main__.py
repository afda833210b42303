#!/usr/bin/env python
"""Do PyTorch's own tests of convolutions pass while cudnn_autotune.enable() is in force?

python benchmarks/pytorch_tests --checkout ../pytorch --json record.json

Runs test/nn/test_convolution.py of a checkout under enable(). Failed tests run again without it.
The checkout must be of the release of torch that runs; only that file of it is needed. A test that
passes only without enable() is a failure of ours, unless REASONS has a reason. Ends with 1 if one
has none.

On a GPU, tests that use no CUDA are left out. On the CPU enable() has no effect; --device cpu
registers its kernels for the CPU, where this package's operators compute by ATen.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments, junit
from common.junit import OUTCOMES
from common.modes import OUR_MODES
from common.record import Record

from pytorch_tests.report import tables

TESTS = Path("test", "nn", "test_convolution.py")
BENCHMARKS = Path(__file__).resolve().parents[1]
# "Class::test", in which * stands for any text -> why it only passes without enable().
REASONS: dict[str, str] = {}


Tests = dict[str, tuple[str, str]]
"""``"Class::test"`` -> its outcome and its message."""


def run(options: Any, folder: Path, again: Collection[str] | None = None) -> Tests:
    """One run, whose process leaves what it counted in ``folder / "counts"``.

    Args:
        again: runs these tests without enable(), instead of all tests of the device with it.

    Raises:
        SystemExit: pytest ran no tests, or not all of them.
    """
    settings_file = folder / "pytest.ini"  # not the checkout's
    settings_file.write_text("[pytest]\n", encoding="utf-8")
    command = ["--noconftest", "-c", str(settings_file), "-W", "ignore", "--tb=short"]
    file = str(options.checkout / TESTS)
    if again is None:
        command += [file, "-p", "pytorch_tests.enabled"]
        command += ["-k", options.select] if options.select else []
    else:
        command += [f"{file}::{test}" for test in again]
    settings = {
        "device": options.device,
        "sampling": options.sampling,
        "benchmark_limit": options.benchmark_limit,
        "counts": str(folder / "counts"),
    }
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "CUDNN_AUTOTUNE_CACHE": "off",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.workers)),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTORCH_SUITE": json.dumps(settings),
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": options.device,
        "PYTEST_ADDOPTS": "",  # those are for the tests of this package
    }
    code, tests = junit.run(command, options, cwd=folder, env=environment)
    if code not in (0, 1):
        sys.exit(f"pytest ended with {code}, so that not all tests have run")
    return {f"{t.group}::{t.name}": (t.outcome, t.message) for t in tests}


def summed(counts: Path) -> dict[str, Any]:
    """The sums of the counts that the processes of the run under enable() left."""
    problems, fallbacks = 0, Counter[str]()
    for file in counts.iterdir():
        part = json.loads(file.read_text(encoding="utf-8"))
        problems += part["problems"]
        fallbacks.update(part["fallbacks"])
    return {"problems": problems, "fallbacks": fallbacks}


def compare(enabled: Tests, without: Tests) -> list[dict[str, str]]:
    """Each test that does not pass under enable(), with a reason; "" where there is none."""
    rows = []
    for test, (outcome, message) in enabled.items():
        if outcome == "passed":
            continue
        former, former_message = without[test]
        why = ""
        if (outcome, message) == (former, former_message) and outcome in ("skipped", "xfailed"):
            why = message or "PyTorch's test says no reason"
        elif former in ("failed", "error"):
            why = f"does not pass without enable() either: {former_message}"
        else:
            why = next((REASONS[p] for p in REASONS if fnmatch.fnmatchcase(test, p)), "")
        rows.append({"test": test, "outcome": outcome, "message": message, "reason": why})
    return rows


def counted(tests: Tests) -> dict[str, int]:
    found = Counter(outcome for outcome, _ in tests.values())
    return {outcome: found[outcome] for outcome in OUTCOMES}


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--checkout", type=Path, required=True, help="a checkout of PyTorch")
    modes = (*OUR_MODES, "online")
    p.add_argument("--sampling", choices=modes, default="sample_once", help="%(default)s")
    p.add_argument(
        "--benchmark-limit", type=int, default=4, help="candidates to time; 0: all (%(default)s)"
    )
    junit.add_options(p)
    p.add_argument("--select", help="run only tests that match this expression of pytest's -k")
    options = p.parse_args()
    options.checkout = options.checkout.resolve()
    if not (options.checkout / TESTS).is_file():
        sys.exit(f"--checkout: {options.checkout} has no {TESTS}")
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    with tempfile.TemporaryDirectory() as text, Record("pytorch_tests", options) as record:
        folder = Path(text)
        (folder / "counts").mkdir()
        enabled = run(options, folder)
        counts = {"with enable()": counted(enabled)}
        record.results.update(counts=counts, **summed(folder / "counts"))
        record.save()
        again = [test for test, (outcome, _) in enabled.items() if outcome != "passed"]
        without = run(options, folder, again) if again else {}
        counts["without, what did not pass"] = counted(without)
    rows = compare(enabled, without)
    record.results["not_passed"] = rows
    record.end(True, tables)
    return 1 if any(not row["reason"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
