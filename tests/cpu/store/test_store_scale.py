"""A store works with twenty thousand decisions."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from support.store.decisions import H200, decision, problem, resealed
from support.store.stored import recorded

from cudnn_autotune.audit import recordings
from cudnn_autotune.store import codec, file_format
from cudnn_autotune.store.file_store import Store

ENTRIES = 20_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file whose lines are a real decision, each for another problem."""
    line = codec.encode(decision(987654321), H200)
    lines = (
        resealed(line.replace(b"x=1x1x987654321x1", b"x=1x1x%dx1" % (number + 1)))
        for number in range(ENTRIES)
    )
    path = tmp_path_factory.mktemp("scale") / "store.json"
    path.write_bytes(file_format.encode(H200, lines))
    return path


@pytest.mark.parametrize("name", recordings.names())
def test_a_decision_takes_two_kilobytes_at_most(name: str, tmp_path: Path) -> None:
    """Of dozens of candidates, those that a later question needs are kept."""
    whole = recorded(name, "sustained")
    store = Store(tmp_path, H200)
    store.add([whole])
    line = store.path.read_bytes().splitlines()[1]
    assert len(line) < 2000
    (kept,) = Store(tmp_path, H200)
    assert kept.key == whole.key
    timed = len(whole.selection.ranking)
    assert timed > 30
    assert 5 < len(kept.selection.ranking) == timed - kept.omitted
    assert kept.selection.winner.low_ms == pytest.approx(whole.selection.winner.low_ms, rel=1e-5)
    assert kept.selection.total_samples == whole.selection.total_samples
    texts = {entry.candidate.text for entry in kept.selection.ranking}
    assert set(whole.selection.evidence.tied) == set(kept.selection.evidence.tied) <= texts
    assert "aten" in texts
    # They include what any limit, and determinism, would choose, or an equally good one.
    limits = {entry.candidate.workspace_bytes for entry in whole.selection.ranking}
    for limit in (None, *limits, *(limit - 1 for limit in limits if limit)):
        for deterministic in (False, True):
            wanted = whole.restricted_to(deterministic, limit)
            found = kept.restricted_to(deterministic, limit)
            assert (wanted is None) == (found is None)
            if wanted is not None and found is not None:
                best, got = wanted.selection.winner.time_ms, found.selection.winner.time_ms
                assert best is not None
                assert got == pytest.approx(best, rel=0.02)
    # Writing it again loses nothing more.
    store.discard([kept])
    store.add([kept])
    assert list(Store(tmp_path, H200)) == [kept]


def test_a_lookup_takes_no_longer_than_in_a_small_store(path: Path, tmp_path: Path) -> None:
    small = Store(tmp_path, H200)
    small.add(decision(number) for number in range(1, 101))
    large = Store(path, H200)
    rng = random.Random(0)

    def calls(store: Store, entries: int) -> int:
        """The number of functions that first lookups call, of which nothing is cached."""
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            for number in rng.sample(range(1, entries + 1), 100):
                assert store.find(problem(size=number)).problem == problem(size=number)
        finally:
            sys.setprofile(None)
        return count

    assert calls(large, ENTRIES) < 2 * calls(small, 100)
