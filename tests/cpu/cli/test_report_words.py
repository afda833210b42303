"""The report's words, numbers and axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored import decisions

from cudnn_autotune import ConvProblem
from cudnn_autotune.cli import wording
from cudnn_autotune.cli.report.section import Axis
from cudnn_autotune.core.display import milliseconds
from cudnn_autotune.engines.selection import Measurement


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "2×8×9×11, 6 of 3×5"),
        ({"padding": 1}, "2×8×9×11, 6 of 3×5, padding 1"),
        ({"padding": (1, 2)}, "2×8×9×11, 6 of 3×5, padding 1,2"),
        ({"padding": (1, 2, 0, 2)}, "2×8×9×11, 6 of 3×5, padding 1,2:0,2"),
        ({"stride": (2, 1)}, "2×8×9×11, 6 of 3×5, stride 2,1"),
        ({"stride": 2, "dilation": 2}, "2×8×9×11, 6 of 3×5, stride 2, dilation 2"),
    ],
)
def test_shapes(changes: dict[str, Any], said: str) -> None:
    problem = ConvProblem("fprop", (2, 8, 9, 11), (6, 8, 3, 5), **changes)
    assert wording.shapes(problem) == said


def test_groups_layouts_and_conditions() -> None:
    grouped = ConvProblem("wgrad", (2, 8, 9), (6, 4, 3), groups=2, allow_tf32=False)
    assert wording.shapes(grouped) == "2×8×9, 6 of 3, groups 2"
    assert wording.layout(grouped) == "ncw"
    assert wording.conditions(grouped) == "no TF32"
    last = ConvProblem(
        "fprop",
        (1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last_3d,
        allow_reduced_precision=False,
        alignment=(2, 4, 32),
    )
    assert wording.layout(last) == "ndhwc"
    assert wording.dtype(last) == "bfloat16"
    assert wording.conditions(last) == "no reduced precision, alignment 2,4,32"
    assert wording.conditions(ConvProblem("fprop", (1, 1, 1), (1, 1, 1))) == ""


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.00123456, "0.001235"),
        (0.0290111, "0.02901"),
        (0.65046, "0.6505"),
        (12.3456, "12.35"),
        (1234.5, "1234"),
        (98765.4, "98765"),
        (1e-12, "0.0000000"),
    ],
)
def test_milliseconds(ms: float | None, said: str) -> None:
    assert milliseconds(ms) == said


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (0.4, "0 ms"),
        (850, "850 ms"),
        (12_340, "12.3 s"),
        (250_000, "4 min 10 s"),
        (59_999.9, "60.0 s"),
        (7_260_000, "2 h 1 min"),
    ],
)
def test_durations(ms: float, said: str) -> None:
    assert wording.duration(ms) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0"),
        (131, "131 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (3211264, "3.1 MiB"),
        (873473171, "833 MiB"),
        (2**40, "1.0 TiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert wording.size(count) == said


def test_printable() -> None:
    assert wording.printable("eng67:KERNEL_CFG=3 µ×") == "eng67:KERNEL_CFG=3 µ×"
    assert wording.printable("a\x1b[2J\nb\u202e\ud800") == "a\ufffd[2J\ufffdb\ufffd\ufffd"


def entry(
    time_ms: float | None, low: float | None = None, high: float | None = None
) -> Measurement:
    candidate = decisions()[0].selection.ranking[0].candidate
    return Measurement(replace(candidate), time_ms, 1, low_ms=low, high_ms=high)


def test_axis() -> None:
    axis = Axis.of([entry(1.0, 0.98, 1.02), entry(1.2, 1.1, 1.3), entry(9.0)])
    assert axis.low_ms == 0.98
    assert axis.high_ms == 1.5  # what is slower than that is only marked
    assert axis.is_beyond(9.0)
    assert not axis.is_beyond(1.5)
    assert axis.percent(0.98) == 4.0
    assert axis.percent(1.24) == 50.0
    assert axis.percent(9.0) == axis.percent(1.5) == 96.0
    assert axis.ticks() == pytest.approx([1.0, 1.2, 1.4])
    assert Axis.of([entry(None)]) is None
    assert Axis.of([]) is None


def test_axis_of_one_time() -> None:
    axis = Axis.of([entry(0.5)])
    assert axis.percent(0.5) == 4.0
    assert axis.high_ms > axis.low_ms


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_axes_are_in_order(times: list[float]) -> None:
    axis = Axis.of([entry(ms, ms * 0.99, ms * 1.01) for ms in times])
    places = [axis.percent(ms) for ms in sorted(times)]
    assert places == sorted(places)
    assert all(4.0 <= place <= 96.0 for place in places)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 6
    slack = 1e-9 * axis.high_ms
    assert all(axis.low_ms - slack <= tick <= axis.high_ms + slack for tick in ticks)
