"""The audit is made of public names, so that a program of a user's can judge modes as it does."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support import checkout

import cudnn_autotune as ca

AUDIT = Path(ca.__file__).parent / "audit"
OWN = f"{ca.__name__}.audit"


def documented() -> set[str]:
    """The public modules that the reference names."""
    pages = (checkout.ROOT / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return {ca.__name__, *re.findall(r"`(cudnn_autotune\.[a-z]\w*)`", text)}


def public(module: ModuleType) -> set[str]:
    """The names that a module offers."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    return set(names)


def used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The package's names in a file, each with its module: imported, or as a module's attribute."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name == ca.__name__}
            assert not [a.name for a in node.names if a.name.startswith(f"{ca.__name__}.")]
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module != ca.__name__ and not node.module.startswith(f"{ca.__name__}."):
            continue
        for alias in node.names:
            yield node.module, alias.name
            found = getattr(importlib.import_module(node.module), alias.name, None)
            if isinstance(found, ModuleType):
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("path", sorted(AUDIT.rglob("*.py")), ids=lambda p: p.stem)
def test_the_audit_uses_public_names_only(path: Path) -> None:
    known = documented()
    for module, name in used(ast.parse(path.read_text(encoding="utf-8"))):
        if f"{module}.".startswith(f"{OWN}.") or (module, name) == (ca.__name__, "audit"):
            continue
        parent = module.rpartition(".")[0]
        assert module in known or parent in known, module
        if parent in known and module not in known:  # such as the module `tools.options`
            assert module.rpartition(".")[2] in public(importlib.import_module(parent)), module
        assert name in public(importlib.import_module(module)), f"{module}.{name}"


def test_what_is_not_public_is_found() -> None:
    """The rule has teeth: these are names of the package that no page documents."""
    code = (
        "from cudnn_autotune.timers.turns import Turns\n"
        "from cudnn_autotune import sampling\nsampling.check('auto')"
    )
    found = set(used(ast.parse(code)))
    assert ("cudnn_autotune.timers.turns", "Turns") in found
    assert "cudnn_autotune.timers.turns" not in documented()
    assert ("cudnn_autotune.sampling", "check") in found
    assert "check" not in public(ca.sampling)
