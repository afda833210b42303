"""The folders of csrc are the rooms of docs/architecture.md; includes point down their floors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.checkout import ROOT

CSRC = ROOT / "csrc"


def floors() -> dict[str, int]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {
        room: int(floor) for floor, room in re.findall(r"^\| (\d) \| `([\w/]+)/` \|", text, re.M)
    }


def room_of(path: Path) -> str:
    return path.parent.as_posix().removesuffix("/detail")


def includes() -> Iterator[tuple[Path, Path]]:
    """Each file with each file of csrc that it includes, both relative to csrc."""
    for path in sorted(CSRC.rglob("*.*")):
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            if name != "build_info.h":  # written by the build
                yield path.relative_to(CSRC), Path(name)


def test_every_folder_is_a_room() -> None:
    folders = {room_of(path.relative_to(CSRC)) for path in CSRC.rglob("*.*")}
    assert folders == set(floors())


def test_includes_point_down() -> None:
    floor = floors()
    seen = list(includes())
    assert len(seen) > 200
    for path, included in seen:
        room, other = room_of(path), room_of(included)
        assert room == other or floor[other] < floor[room], f"{path} includes {included}"


def test_details_are_seen_by_sources_of_their_own_room_only() -> None:
    for path, included in includes():
        if included.parent.name == "detail":
            assert room_of(path) == room_of(included), f"{path} includes {included}"
            assert path.suffix == ".cpp" or path.parent.name == "detail", path
