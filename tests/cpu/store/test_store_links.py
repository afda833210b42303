"""In a folder that users share, nobody has a file of another user replaced by a planted link."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.store.decisions import H200, decision
from support.store.stored import decisions, fill, refused, succeeded

from cudnn_autotune.core import atomic_file
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import peaks_file
from cudnn_autotune.store.file_store import Store

OTHER = 54321  # a user that has no account
NOTES = b"buy milk"
PEAKS = Peaks(4e9, {"float64": 6e10}, 0.002)

is_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a link that belongs to another user"
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write to, as /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def planted(link: Path, target: Path, owner: int = OTHER) -> Path:
    link.symlink_to(target)
    os.lchown(link, owner, owner)
    return link


def keep_peaks(folder: Path) -> None:
    peaks_file.keep(folder, H200, PEAKS)


def keep_decision(folder: Path) -> None:
    store = Store(folder, H200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.add([decision(1)])
    assert list(store)[-1] == decision(1)  # it is in memory


def export(folder: Path) -> None:
    store = fill(folder / "store.json", decisions()[:1])
    succeeded("export", folder / "out.json", "--force", "--store", store)


def report(folder: Path) -> None:
    store = fill(folder / "store.json", decisions()[:1])
    succeeded("report", folder / "out.html", "--force", "--store", store)


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "peaks": (keep_peaks, peaks_file.path_of(Path("/"), H200).name),
    "store": (keep_decision, H200.file_name),
    "lock": (keep_decision, f"{H200.file_name}.lock"),
    "export": (export, "out.json"),
    "report": (report, "out.html"),
}


def attempted(write: Callable[[Path], None], folder: Path) -> None:
    """Writes, or is refused."""
    try:
        write(folder)
    except (OSError, AssertionError) as error:
        # An AssertionError tells that the command has not succeeded.
        assert "link" in str(error)  # noqa: PT017


@is_root
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("what", ["notes", "nothing", "a store", "peaks"])
def test_a_link_of_another_user_is_not_followed(
    shared: Path, tmp_path: Path, name: str, what: str
) -> None:
    write, file_name = WRITERS[name]
    mine = tmp_path / "mine.json"
    if what == "notes":
        mine.write_bytes(NOTES)
    elif what == "a store":
        Store(mine, H200).add([decision(2)])
        Path(f"{mine}.lock").unlink()
    elif what == "peaks":
        peaks_file.keep(tmp_path, H200, PEAKS)
        peaks_file.path_of(tmp_path, H200).rename(mine)
    before = mine.read_bytes() if mine.exists() else None
    status = mine.stat() if mine.exists() else None
    link = planted(shared / file_name, mine)
    attempted(write, shared)
    assert link.is_symlink()
    assert (mine.read_bytes() if mine.exists() else None) == before
    assert (mine.stat() if mine.exists() else None) == status
    assert {path.name for path in tmp_path.iterdir()} <= {mine.name}


@is_root
def test_a_link_to_a_link_of_another_user_is_not_followed(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(NOTES)
    planted(shared / "second", tmp_path / "mine")
    (shared / "first").symlink_to("second")
    with pytest.raises(PermissionError, match="link that another user may have made"):
        atomic_file.write(shared / "first", b"new")
    assert (tmp_path / "mine").read_bytes() == NOTES


@is_root
def test_in_the_folder_of_another_user_not_even_an_own_link_is_followed(
    shared: Path, tmp_path: Path
) -> None:
    """Its owner may have moved the link there."""
    os.chown(shared, OTHER, OTHER)
    (tmp_path / "mine").write_bytes(NOTES)
    (shared / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="link that another user may have made"):
        atomic_file.write(shared / "link", b"new")
    assert (tmp_path / "mine").read_bytes() == NOTES


@is_root
def test_a_link_that_is_planted_while_the_store_is_open(shared: Path, tmp_path: Path) -> None:
    store = Store(shared, H200)
    planted(shared / H200.file_name, tmp_path / "mine.json")
    with pytest.warns(UserWarning, match="cannot be written.*link"):
        store.add([decision(1)])
    assert list(store) == [decision(1)]
    assert not store.is_writable
    assert not list(tmp_path.iterdir())


def test_own_links_are_followed(tmp_path: Path) -> None:
    """Some keep the files of their programs in a folder of their own, and links to them."""
    real, place = tmp_path / "dotfiles", tmp_path / "cache"
    real.mkdir()
    place.mkdir()
    (place / H200.file_name).symlink_to("../dotfiles/second.json")
    (real / "second.json").symlink_to("store.json")
    peaks = peaks_file.path_of(place, H200)
    peaks.symlink_to(real / "peaks")
    Store(place, H200).add([decision(1)])
    Store(place, H200).add([decision(2)])
    assert list(Store(real / "store.json", H200)) == [decision(1), decision(2)]
    for launch_ms in (0.002, 0.001):
        peaks_file.keep(place, H200, Peaks(4e9, {"float64": 6e10}, launch_ms))
        assert peaks_file.find(place, H200).peaks.launch_ms == launch_ms
    assert (real / "peaks").is_file()
    for link in (place / H200.file_name, real / "second.json", peaks):
        assert link.is_symlink()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def terminal(path: Path) -> None:
    path.symlink_to(os.ttyname(os.openpty()[1]))


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@pytest.mark.parametrize("make", [pipe, bound_socket, terminal, link_to_a_pipe])
@pytest.mark.parametrize("name", ["export", "report"])
def test_what_is_no_file_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    store = fill(tmp_path / "store.json", decisions()[:1])
    out = Path("out.json" if name == "export" else "out.html")
    make(out)
    kind = stat.S_IFMT(out.stat().st_mode)
    text = refused(name, out, "--force", "--store", store)
    assert f"cannot write {out}: it is no regular file" in text
    assert stat.S_IFMT(out.stat().st_mode) == kind
    with pytest.raises(OSError, match="no regular file"):
        atomic_file.write(out, b"new")
    assert stat.S_IFMT(out.stat().st_mode) == kind


def test_a_file_is_set_aside_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", without_links)
    store = Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    damaged = store.path.read_bytes()[:-30]
    store.path.write_bytes(damaged)
    with pytest.warns(UserWarning, match="set aside as"):
        assert list(Store(tmp_path, H200)) == [decision(1)]
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
