"""Which pages of memory are in the L2 cache's far partition, by the cycles to each of them."""

from __future__ import annotations

import pytest

from cudnn_autotune import _C

pytestmark = pytest.mark.skipif(not hasattr(_C, "far_pages"), reason="built with a CPU-only torch")

# Of three H200s, multiprocessor 131: cycles of four atomic additions to each of a block's first
# pages; and what a convolution took there whose engine keeps its tile counter in the page, in us.
H200: list[tuple[list[int], list[float]]] = [
    (
        [1101, 1909, 1941, 1055, 1261, 2006, 1933, 1080, 1953, 1077, 1229, 1790,
         2064, 1189, 1126, 1885, 1081, 1978, 1885, 1126, 1078, 1951, 2025, 1243],
        [23.8, 20.3, 20.2, 23.6, 23.3, 20.2, 20.3, 23.6, 20.2, 23.7, 23.4, 20.3,
         20.2, 23.7, 23.6, 20.2, 23.6, 20.2, 20.3, 23.5, 23.7, 20.4, 20.3, 23.5],
    ),
    (
        [1101, 1908, 1942, 1055, 1255, 2007, 1934, 1083, 1953, 1080, 1225, 1791,
         2065, 1190, 1126, 1884, 1085, 1979, 1885, 1125, 1078, 1953, 2025, 1243],
        [23.8, 20.4, 20.4, 23.3, 23.5, 20.4, 20.2, 23.6, 20.3, 23.9, 23.0, 20.3,
         20.3, 23.7, 23.6, 20.3, 23.4, 20.2, 20.2, 23.6, 23.8, 20.3, 20.3, 23.2],
    ),
    (
        [1095, 1790, 1942, 1110, 1254, 2008, 1920, 1104, 1928, 1089, 1225, 1930,
         2066, 1189, 1112, 1791, 1109, 1979, 1792, 1108, 1086, 1929, 2026, 1243],
        [22.9, 19.5, 19.5, 22.8, 22.3, 19.5, 19.5, 22.7, 19.4, 22.6, 22.4, 19.5,
         19.5, 22.6, 22.6, 19.5, 22.9, 19.4, 19.5, 23.0, 22.6, 19.5, 19.5, 22.4],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cycles", "times_us"), H200)
def test_far_pages_are_those_where_the_convolution_was_fast(
    cycles: list[int], times_us: list[float]
) -> None:
    fast = [i for i, time_us in enumerate(times_us) if time_us < 1.05 * min(times_us)]
    assert 8 <= len(fast) <= 16
    assert _C.far_pages(cycles) == fast


@pytest.mark.parametrize(
    "cycles",
    [
        [],
        [1000],
        [0] * 24,
        [1000] * 24,
        [1000 + i * 10 for i in range(24)],  # a spread without a gap
        [1000] * 23 + [2000],  # one that was disturbed
        [500] + [1000] * 23,
        [0] + [1000] * 12 + [2000] * 12,  # a measurement that did not end
    ],
    ids=["none", "one", "did_not_run", "alike", "spread", "late", "early", "broken_off"],
)
def test_without_two_groups_no_page_is_better(cycles: list[int]) -> None:
    assert _C.far_pages(cycles) == []
