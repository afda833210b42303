"""The site: its pages of the API have every public name, and its build says what it lacks."""

from __future__ import annotations

import importlib
import inspect
import pydoc
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
            if name.startswith(f"{ca.__name__}.") and kind != "automodule":
                found[name] = pydoc.locate(name)
                continue
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


def annotations(value: object) -> Iterator[tuple[str, str]]:
    """Yields what a function returns, and the types of a class's attributes, each with the module
    whose names it uses."""
    if inspect.isfunction(value):
        yield value.__module__, str(value.__annotations__.get("return", ""))
    for base in own_bases(value) if inspect.isclass(value) else ():
        for name, text in inspect.get_annotations(base).items():
            if not name.startswith("_"):
                yield base.__module__, str(text)
        for name, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "func", member)
            function = getattr(function, "__func__", function)
            if not name.startswith("_") and inspect.isfunction(function):
                yield from annotations(function)


def own_bases(value: type) -> list[type]:
    return [one for one in inspect.getmro(value) if one.__module__.startswith(ca.__name__)]


def returned() -> set[str]:
    """The classes of the package that public names return, or have as attributes, and that are not
    public themselves. The compiled part has no docstrings."""
    public = [getattr(room, name) for room in rooms() for name in room.__all__]
    found, waiting = {}, [*public]
    while waiting:
        for module, text in annotations(waiting.pop()):
            for name in re.findall(r"[A-Za-z_][\w.]*", text):
                one = pydoc.locate(f"{module}.{name}")
                path = f"{one.__module__}.{one.__qualname__}" if inspect.isclass(one) else ""
                is_ours = path.startswith(f"{ca.__name__}.") and not path.startswith(ca._C.__name__)
                if is_ours and path not in found and all(one is not known for known in public):
                    found[path] = one
                    waiting.append(one)
    return {*found}


def test_what_is_described_is_public_or_returned() -> None:
    public = {f"{room.__name__}.{name}" for room in rooms() for name in room.__all__}
    assert described().keys() - public == {ca.__name__} | returned()


def test_inherited_attributes_are_described() -> None:
    """A base that has no place on a page gives its attributes to the classes that have one."""
    found = described()
    text = (ROOT / "docs" / "api" / "cudnn_autotune.rst").read_text(encoding="utf-8")
    for kind, name, options in _DIRECTIVE.findall(text):
        if kind == "autoclass" and ":members:" in options and ":inherited" not in options:
            first, *others = own_bases(found.get(f"{ca.__name__}.{name}", found.get(name)))
            hidden = [one for one in others if all(one is not known for known in found.values())]
            assert not any(inspect.get_annotations(one) for one in hidden), first


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
