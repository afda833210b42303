"""A decision keeps the measured candidates, has a key, and round-trips through a file."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import simulation
from support.store.decisions import FRONTIER, H200, decision, problem
from support.tuning.strategies import AT_ONCE

import cudnn_autotune as ca
from cudnn_autotune import sampling
from cudnn_autotune.engines.candidate_id import config_of
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem_json import problem_to_json
from cudnn_autotune.engines.selection import Evidence, Selection
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.store import codec, file_format
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.store.file_store import Store


def through_a_file(known: Decision) -> Decision:
    return codec.decode(codec.encode(known, H200), H200)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True},
        {"workspace_limit": 0},
        {"workspace_limit": 2**63 - 1},
        {"benchmark_limit": 10, "sampling": "race"},
        {"relative_error": None},
        {"rejected": (("eng1:KERNEL_CFG=3", 0.7), ("eng2", math.inf))},
        {"sampling": "a mode of Zoë's"},
    ],
    ids=str,
)
def test_it_round_trips(changes: dict[str, Any]) -> None:
    known = decision(**changes)
    assert through_a_file(known) == known


@pytest.mark.parametrize("preset", simulation.preset_names())
@pytest.mark.parametrize("mode", AT_ONCE)
def test_every_modes_selection_is_kept(mode: str, preset: str) -> None:
    timer = simulation.preset(preset)
    chosen = sampling.get(mode).select(timer.candidates, timer, Limits())
    known = decision(selection=chosen, sampling=mode)
    kept = through_a_file(known)
    assert through_a_file(kept) == kept
    assert kept.chosen.candidate == chosen.winner.candidate
    assert kept.selection.evidence.rule == chosen.evidence.rule
    assert known.chosen == chosen.winner
    assert known.selection.evidence == chosen.evidence


def test_the_chosen_one_is_the_first_that_is_not_wrong() -> None:
    known = decision(rejected=(("fastest", 0.5),))
    assert known.chosen == FRONTIER[1]
    assert known.selection.ranking == FRONTIER  # rejected candidates are still listed
    wrong = tuple((entry.candidate.text, 0.5) for entry in FRONTIER)
    assert decision(rejected=wrong).chosen is None


def test_the_key_leaves_out_the_constraints() -> None:
    key = decision().key
    assert key.isprintable()
    for alike in (decision(deterministic=True), decision(workspace_limit=5), decision(day=9)):
        assert alike.key == key
    others = [
        decision(57),
        decision(sampling="race"),
        decision(benchmark_limit=10),
        decision(problem=problem(dtype=torch.bfloat16)),
    ]
    assert len({key, *(other.key for other in others)}) == 5


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sampling", ""),
        ("sampling", "two\nlines"),
        ("sampling", 'quo"ted'),
        ("sampling", "back\\slash"),
        ("benchmark_limit", -1),
        ("benchmark_limit", True),
        ("workspace_limit", -1),
        ("workspace_limit", 1.5),
        ("relative_error", math.nan),
        ("relative_error", math.inf),
        ("relative_error", -1.0),
        ("selection", ca.Selection((), 0)),
    ],
    ids=str,
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=argument):
        decision(**{argument: value})


def test_its_json_has_names_and_leaves_out_defaults() -> None:
    known = decision(rejected=(("wrong", math.inf),))
    tree = json.loads(json.dumps(known.to_json(), allow_nan=False))
    assert tree["problem"] == problem_to_json(known.problem)
    assert tree["rejected"] == [["wrong", None]]
    assert [row["candidate"]["text"] for row in tree["selection"]["ranking"]] == [
        row.candidate.text for row in FRONTIER
    ]
    assert tree["selection"]["evidence"]["tied"] == ["fastest"]
    assert tree["provenance"]["time"] == known.provenance.time
    assert "omitted" not in tree


def test_times_are_kept_in_utc_and_sort_as_texts() -> None:
    times = [
        "2026-01-02T00:30:00+01:00",  # in UTC it is 23:30 of the day before
        "2026-01-01T23:45:00Z",
        "2026-01-01T23:45:00.000001+00:00",
        "2026-01-02T00:00:00Z",
    ]
    kept = [Provenance(time=time).time for time in times]
    assert kept == sorted(kept)
    assert kept[0] == "2026-01-01T23:30:00.000000Z"
    assert all(Provenance(time=time).time == time for time in kept)


# A store's file that an earlier build of the package wrote is read, and its entries are encoded
# to the same bytes again.

WRITTEN = Path(__file__).parent / "data" / "h200_store.json"
HEADER, *LINES = WRITTEN.read_bytes().splitlines()


def unread(decision: Decision) -> Decision:
    """Returns an equal decision that does not remember the line it was read from."""
    return replace(decision)


@pytest.mark.parametrize("line", LINES)
def test_an_entry_is_encoded_to_the_bytes_it_was_read_from(line: bytes) -> None:
    decision = codec.decode(line, H200)
    assert not codec.is_as_read(unread(decision), H200)
    assert codec.encode(unread(decision), H200) == line


def test_the_header_is_encoded_alike() -> None:
    header, *_ = file_format.encode(H200, LINES).splitlines()
    written, expected = json.loads(header), json.loads(HEADER)
    assert written.pop("id") != expected.pop("id")  # each file has its own
    assert written == expected


def test_a_store_serves_the_file_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    path = Path(shutil.copy(WRITTEN, tmp_path / "store.json"))
    store = Store(path, H200)
    assert {codec.encode(known, H200) for known in store} == set(LINES)
    store.add(map(unread, [*store]))
    assert path.read_bytes() == WRITTEN.read_bytes()


def test_a_knob_that_has_a_name_by_now_is_found_under_it() -> None:
    """As an earlier version wrote it, which knew the knob's number only."""
    texts = ("eng67:KNOB_44=1,SWAP_AB=0", "unfused:eng3:KNOB_45=2", "eng9:KNOB_45=1")
    names = (
        "eng67:INPUT_TMA_ENABLE=1,SWAP_AB=0",
        "unfused:eng3:OUTPUT_TMA_ENABLE=2",
        "eng9:OUTPUT_TMA_ENABLE=1",
    )
    first, second, third = texts
    ranking = [
        replace(
            FRONTIER[0],
            candidate=replace(FRONTIER[0].candidate, text=text, engine=engine, knobs=knobs),
        )
        for text in (first, second)
        for engine, knobs in [config_of(text)]
    ]
    aten = replace(FRONTIER[1], candidate=OWN_PATH, runs=second)
    evidence = Evidence("fastest", tied=(first, second))
    known = decision(selection=Selection((*ranking, aten), 9, evidence), rejected=((third, 0.5),))
    line = codec.encode(known, H200)
    assert b"KNOB_44" in line
    found = codec.decode(line, H200)
    assert [e.candidate.text for e in found.selection.ranking] == [*names[:2], "aten"]
    assert found.chosen.candidate.knobs == {"INPUT_TMA_ENABLE": 1, "SWAP_AB": 0}
    assert found.selection.ranking[2].runs == names[1]
    assert found.selection.evidence.tied == names[:2]
    assert found.rejected == ((names[2], 0.5),)
    # What was read is not written in another way as long as nothing of it changes.
    assert codec.encode(found, H200) == line
    again = codec.encode(replace(found, omitted=1), H200)
    assert b"KNOB_" not in again
    assert codec.decode(again, H200) == replace(found, omitted=1)
