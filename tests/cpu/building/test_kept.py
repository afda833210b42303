"""A build of what was built before copies that library, and compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import checkout

kept = checkout.module("building.kept")
FACTS = {"torch": "2.14.1", "macros": ["A"]}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    for name in ("a.cpp", "b.h"):
        (tmp_path / name).write_text(f"// {name}\n")
    return sorted(tmp_path.iterdir())


def test_what_a_build_depends_on_changes_its_digest(sources: list[Path]) -> None:
    environ = {"CXXFLAGS": "-O1"}
    first = kept.digest(FACTS, sources, environ)
    assert kept.digest(dict(reversed(FACTS.items())), sources[::-1], environ) == first
    assert kept.digest(FACTS, sources, {**environ, "HOME": "/elsewhere"}) == first
    others = {
        kept.digest({**FACTS, "torch": "2.15.0"}, sources, environ),
        kept.digest(FACTS, sources[:1], environ),
        kept.digest(FACTS, sources, {"CXXFLAGS": "-O3"}),
        kept.digest(FACTS, sources, {**environ, "CXX": "a-compiler-that-is-not-there"}),
    }
    sources[0].write_text("// a.cpp, changed\n")
    others.add(kept.digest(FACTS, sources, environ))
    assert len(others | {first}) == 6


def test_a_library_is_kept_for_the_same_digest_alone(tmp_path: Path) -> None:
    library, copy = tmp_path / "build" / "_C.so", tmp_path / "lib" / "x" / "_C.so"
    library.parent.mkdir()
    library.write_bytes(b"first")
    folder = tmp_path / "kept"
    assert not kept.Kept(folder, "1").copy_to(copy)
    kept.Kept(folder, "1").keep(library)
    assert not kept.Kept(folder, "2").copy_to(copy)
    assert not copy.exists()
    assert kept.Kept(folder, "1").copy_to(copy)
    assert copy.read_bytes() == b"first"
    library.write_bytes(b"second")
    kept.Kept(folder, "2").keep(library)
    assert not kept.Kept(folder, "1").copy_to(copy)
    assert kept.Kept(folder, "2").copy_to(copy)
    assert copy.read_bytes() == b"second"
    (folder / "_C.so").unlink()
    assert not kept.Kept(folder, "2").copy_to(copy)


def test_a_copy_that_broke_off_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_C.so"
    library.write_bytes(b"whole")

    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"wh")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept.shutil, "copyfile", full)
        with pytest.raises(OSError, match="no space"):
            kept.Kept(tmp_path / "kept", "1").keep(library)
    assert not kept.Kept(tmp_path / "kept", "1").copy_to(tmp_path / "copy" / "_C.so")
