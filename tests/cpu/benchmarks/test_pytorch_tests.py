"""benchmarks/pytorch_tests, on a small file of tests in the place of PyTorch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes.benchmark_scripts import main

pytestmark = pytest.mark.search

TESTS = """
import os
import torch
from torch import nn
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_nn import NNTestCase
from torch.testing._internal.common_utils import run_tests
import unittest

class TestOnDevices(NNTestCase):
    def test_passes(self, device):
        layer = nn.ConvTranspose2d(2, 3, 3, stride=2).to(device)
        layer(torch.randn(1, 2, 4, 4, device=device)).sum().backward()

instantiate_device_type_tests(TestOnDevices, globals())

class TestAlone(NNTestCase):
    def test_fails(self):
        self.assertEqual(1, 2)

    @unittest.skip("of no matter")
    def test_is_skipped(self):
        pass

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.assertEqual(1, 2)

    def test_fails_with_ours(self):
        import sys
        self.assertNotIn("cudnn_autotune", sys.modules)
"""


@pytest.mark.slow
def test_what_only_fails_under_enable_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "checkout" / "test" / "nn" / "test_convolution.py"
    path.parent.mkdir(parents=True)
    path.write_text(TESTS)
    options = ("--device", "cpu", "--sampling", "heuristic", "--checkout", tmp_path / "checkout")
    files = ("--json", tmp_path / "it.json", "--log", tmp_path / "log")
    assert main("pytorch_tests", *options, *files) == 1
    results = json.loads((tmp_path / "it.json").read_text())["results"]
    assert results["problems"] == 0
    assert results["fallbacks"] == {}
    counts = {"passed": 1, "failed": 2, "error": 0, "skipped": 1, "xfailed": 1}
    assert results["counts"] == {
        "with enable()": counts,
        "without, what did not pass": {**counts, "failed": 1},
    }
    reasons = {row["test"].partition("::test_")[2]: row["reason"] for row in results["not_passed"]}
    assert reasons.pop("fails").startswith("does not pass without enable() either: ")
    assert reasons == {
        "is_skipped": "of no matter",
        "fails_as_expected": "PyTorch's test says no reason",
        "fails_with_ours": "",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "select", "status"),
    [(TESTS, "test_of_no_such_name", 5), (f"import no_such_module\n{TESTS}", "test_passes", 2)],
    ids=["none selected", "not imported"],
)
def test_a_run_without_tests_does_not_pass(
    text: str, select: str, status: int, tmp_path: Path
) -> None:
    path = tmp_path / "test" / "nn" / "test_convolution.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    options = ("--device", "cpu", "--checkout", tmp_path, "--log", tmp_path / "log")
    ended = main("pytorch_tests", *options, "--select", select)
    assert str(ended) == f"pytest ended with {status}, so that not all tests have run"
