"""The library of an earlier build, kept beside its objects for a build of the same.

pip's build isolation fetches cuDNN's frontend into a new folder each time, so that to ninja every
object is out of date. What the library is made of tells whether it is.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

# A compiler heeds these, or setuptools gives them to it.
VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "CPATH")


def digest(
    facts: Mapping[str, object], files: Iterable[Path], environ: Mapping[str, str] = os.environ
) -> str:
    """A digest of all that a build depends on: ``facts``, the contents of ``files``, Python, the
    compiler and its flags."""
    found = hashlib.sha256()
    flags = {name: environ.get(name, "") for name in VARIABLES}
    python = [sysconfig.get_config_var(name) for name in ("EXT_SUFFIX", "CXX", "CFLAGS")]
    found.update(repr((sorted(facts.items()), flags, python, _compiler(environ))).encode())
    for path in sorted(files):
        found.update(f"\0{path.as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _compiler(environ: Mapping[str, str]) -> str:
    """Returns the compiler's own text of its version; empty if it cannot be asked."""
    command = environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    try:
        asked = [*shlex.split(command), "--version"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


class Kept:
    """A folder with one library, and the digest of what it is made of."""

    def __init__(self, folder: Path, made_of: str) -> None:
        self._folder, self._made_of = folder, made_of

    def copy_to(self, library: Path) -> bool:
        """Writes the library there, if it is kept; returns whether it is."""
        kept, digest = self._folder / library.name, self._folder / "digest.txt"
        is_known = digest.is_file() and digest.read_text(encoding="utf-8") == self._made_of
        if not is_known or not kept.is_file():
            return False
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, library)
        return True

    def keep(self, library: Path) -> None:
        """Keeps a library that was just built, in the place of the one before."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        shutil.copyfile(library, self._folder / library.name)
        # Last: a copy that broke off has no digest.
        (self._folder / "digest.txt").write_text(self._made_of, encoding="utf-8")
