"""docs/backend.md walks through the code that is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from checkout import ROOT

import cudnn_autotune as ca

FOLDER = Path(ca.__file__).parent / "nn" / "backend"
PAGE = (ROOT / "docs" / "backend.md").read_text("utf-8")
FILES = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"]


def test_every_stop_exists_and_every_file_has_one() -> None:
    stops = re.findall(r"`(\w+)\.py`,\s+`([\w.]+)`", PAGE)
    for file, name in stops:
        found = importlib.import_module(f"cudnn_autotune.nn.backend.{file}")
        for part in name.split("."):
            found = getattr(found, part)
    assert sorted({file for file, _ in stops}) == FILES


def test_files_import_files_of_later_stops_only() -> None:
    order = ["entry", "training_graph", "compiled_graph", "programs", "each_image"]
    order += ["layouts", "frozen_weights", "graph_copies", "norms", "aliasing", "folding"]
    order += ["judges", "slices", "concatenations", "groups", "activations", "comparison"]
    assert sorted(order) == FILES
    for i, file in enumerate(order):
        tree = ast.parse((FOLDER / f"{file}.py").read_text("utf-8"))
        modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        prefix = "cudnn_autotune.nn.backend."
        imported = [str(m).removeprefix(prefix) for m in modules if str(m).startswith(prefix)]
        assert set(imported) <= set(order[i + 1 :]), file
