"""The package is what docs/architecture.md says: few rooms, and imports that point one way."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support import checkout

import cudnn_autotune as ca

PACKAGE = Path(ca.__file__).parent
ROOT = checkout.ROOT


def rooms() -> list[str]:
    """As the documentation lists them, from the top down."""
    return [*listed("companion"), *listed("core")]


def listed(kind: str) -> list[str]:
    """The rooms in the documentation's table of the companions or of the core."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {kind} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("cudnn_autotune.")}
    return found & set(rooms())


def test_the_documentation_lists_every_room() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(rooms())
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"_build_info.py"}
    assert modules == {"__init__.py", "__main__.py", "functional.py"}
    assert len(listed("core")) <= 7


def test_the_files_that_it_names_are_there() -> None:
    """A path begins at the checkout, the package, or a folder that a walk goes through."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    bases = (ROOT, PACKAGE, *(PACKAGE / room for room in ("models", "compile", "kernels")))
    named = re.findall(r"`([\w/]*)(?:\{([\w/,]+)\})?([\w/]*\.(?:py|pyi|cpp|h|cu|cuh))`", text)
    names = [f"{head}{part}{tail}" for head, parts, tail in named for part in parts.split(",")]
    assert len(names) > 50
    assert [name for name in names if not any((base / name).exists() for base in bases)] == []


def test_every_room_says_what_it_is_for() -> None:
    for room in rooms():
        module = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(module), room


def test_imports_point_down() -> None:
    order = rooms()
    for level, room in enumerate(order):
        above = set(order[:level])
        for path in (PACKAGE / room).rglob("*.py"):
            assert not imported_rooms(path) & above, path


def test_the_core_imports_no_companion() -> None:
    for room in listed("core"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert not imported_rooms(path) & set(listed("companion")), path


def test_every_public_name_is_there() -> None:
    for name in ca.__all__:
        assert getattr(ca, name) is not None


def test_there_is_one_stopwatch_of_the_gpu() -> None:
    paths = [
        path
        for folder in ("cudnn_autotune", "benchmarks")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    found = [
        path.name for path in paths if "enable_timing=True" in path.read_text(encoding="utf-8")
    ]
    assert found == ["stopwatch.py"]
