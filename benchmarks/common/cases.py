"""Cases of a layer list, by parts of their ids."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

LAYERS = Path(__file__).resolve().parents[1] / "layers.json"


def add_options(p: argparse.ArgumentParser, cases: str) -> None:
    """``--layers`` and ``--cases``, which is ``cases`` by default."""
    p.add_argument("--layers", type=Path, default=LAYERS)
    p.add_argument(
        "--cases",
        default=cases,
        help="comma-separated parts of case ids (layer/op/dtype/layout); %(default)s",
    )


def selected(options: argparse.Namespace, seed: int = 0) -> list[Any]:
    """The cases that the options name, in the fair order of ``audit.layers.select``."""
    from cudnn_autotune.audit.layers import load, select

    try:
        known = load(options.layers)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    try:
        return select(known, options.cases, seed=seed)
    except ValueError as error:
        sys.exit(f"--cases: {error}")


def wanted(path: Path, text: str) -> list[Any]:
    """The cases that have one of the comma-separated texts in their id, in the texts' order."""
    from cudnn_autotune.audit.layers import load

    known = load(path)
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        fitting = {case.id: case for case in known if part in case.id}
        if not fitting:
            sys.exit(f"--cases: no case of {path.name} has {part!r} in its id")
        found.update(fitting)
    if not found:
        sys.exit("--cases: must name at least one case")
    return list(found.values())


def layer_text(case_id: str) -> str:
    """Without the layout."""
    return "/".join(case_id.split("/")[:3])
