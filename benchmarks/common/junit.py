"""Reads what pytest writes with ``--junitxml``."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


class Test(NamedTuple):
    group: str
    """The last part of its class or module."""
    name: str
    seconds: float
    outcome: str
    """One of ``OUTCOMES``."""
    message: str
    """The first line, where it did not pass."""


def read(path: Path) -> Iterator[Test]:
    """Yields the tests of a report."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "failed" if child.tag == "failure" else child.tag
                if child.get("type") == "pytest.xfail":
                    outcome = "xfailed"
                message = (child.get("message") or "").strip().partition("\n")[0]
        group = case.get("classname", "").rpartition(".")[2]
        yield Test(group, case.get("name", ""), float(case.get("time", 0)), outcome, message)
