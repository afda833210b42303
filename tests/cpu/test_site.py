"""The site: its pages of the API have every public name, and its build says what it lacks."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.checkout import ROOT
from support.processes.subprocesses import python

import cudnn_autotune as ca

_DIRECTIVE = re.compile(r"^\.\. (\w+|py:data):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)


def rooms(module: ModuleType = ca) -> Iterator[ModuleType]:
    """Yields the package and the public modules in it that name what is public."""
    yield module
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value) and hasattr(value, "__all__"):
            yield from rooms(value)


def described() -> dict[str, Any]:
    """Returns what the pages of the API describe, by its full name."""
    found: dict[str, Any] = {}
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        module = ca
        for kind, name, options in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            names = [name]
            if kind == "automodule":
                found[name] = module = importlib.import_module(name)
                # Of its members Sphinx takes the classes and functions.
                left_out = re.findall(
                    r"\w+", "".join(re.findall(r":exclude-members:(.*)", options))
                )
                names = [
                    member
                    for member in getattr(module, "__all__", ())
                    if ":members:" in options and member not in left_out
                    if inspect.isclass(value := getattr(module, member)) or inspect.isroutine(value)
                ]
            found |= {f"{module.__name__}.{one}": getattr(module, one) for one in names}
    return found


@pytest.mark.parametrize("room", list(rooms()), ids=lambda room: room.__name__)
def test_every_public_name_is_described(room: ModuleType) -> None:
    found = described()
    assert room.__name__ in found
    # What two rooms offer is described in the first of them.
    lacking = [
        name
        for name in room.__all__
        if f"{room.__name__}.{name}" not in found
        if f"{ca.__name__}.{name}" not in found or getattr(ca, name) is not getattr(room, name)
    ]
    assert lacking == []


def test_what_is_described_is_public() -> None:
    public = {f"{room.__name__}.{name}" for room in rooms() for name in room.__all__}
    assert described().keys() - public == {ca.__name__}


def errors() -> list[type[Exception]]:
    values = [getattr(room, name) for room in rooms() for name in room.__all__]
    classes = [v for v in values if isinstance(v, type) and issubclass(v, Exception)]
    return [one for one in classes if one is not RuntimeError]  # PlanError of a build without CUDA


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_an_error_says_what_failed(error: type[Exception]) -> None:
    assert len((vars(error)["__doc__"] or "").split()) > 5


def test_the_build_says_that_the_package_is_lacking(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", tmp_path / "docs")
    (tmp_path / "README.md").write_text("# A page\n")
    (tmp_path / "cudnn_autotune.py").write_text("raise ImportError('it is not built')\n")
    done = python("-m", "sphinx", "-q", "-W", "-c", "docs", ".", "site", cwd=tmp_path)
    assert done.returncode == 1
    said = "The site tells of the installed package (pip install '.[docs]'): it is not built"
    assert done.stderr.strip() == said


def test_the_command_is_the_same_everywhere() -> None:
    command = r"python -m sphinx (-q )?-W (--keep-going )?-c docs \. "
    for file in ("CONTRIBUTING.md", ".ci/run", ".github/workflows/docs.yml", "CHANGELOG.md"):
        assert re.search(command, (ROOT / file).read_text()), file
