"""docs/architecture.md walks through the code that is there."""

from __future__ import annotations

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

from support.checkout import ROOT

import cudnn_autotune as ca

FOLDER = Path(ca.__file__).parent / "compile"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
FILES = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"]


def test_every_stop_exists_and_every_file_has_one() -> None:
    stops = re.findall(r"`(\w+)\.py`,\s+`([\w.]+)`", PAGE)
    for file, name in stops:
        found = importlib.import_module(f"cudnn_autotune.compile.{file}")
        for part in name.split("."):
            found = getattr(found, part)
    assert sorted({file for file, _ in stops}) == FILES


def test_imports_point_one_way() -> None:
    prefix = "cudnn_autotune.compile."
    imported = {}
    for file in FILES:
        tree = ast.parse((FOLDER / f"{file}.py").read_text("utf-8"))
        modules = [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported[file] = {m.removeprefix(prefix) for m in modules if m.startswith(prefix)}
    assert imported["entry"] >= {"compiled_graph", "training_graph"}
    TopologicalSorter(imported).prepare()  # raises CycleError
