"""Cases of a layer list, by parts of their ids."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYERS = Path(__file__).resolve().parents[1] / "layers.json"


def add_options(p: argparse.ArgumentParser, cases: Sequence[str]) -> None:
    """Adds ``--layers`` and ``--cases``, which is ``cases`` by default."""
    p.add_argument("--layers", type=Path, default=LAYERS)
    p.add_argument(
        "--cases",
        default=",".join(cases),
        help="comma-separated parts of case ids (layer/op/dtype/layout); %(default)s",
    )


def wanted(path: Path, text: str) -> list[Any]:
    """The cases that have one of the comma-separated texts in their id, in the texts' order; exits
    where a text fits none."""
    from cudnn_autotune.audit.layers import load

    try:
        known = load(path)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        fitting = {case.id: case for case in known if part in case.id}
        if not fitting:
            sys.exit(f"--cases: no case of {path.name} has {part!r} in its id")
        found.update(fitting)
    if not found:
        sys.exit("--cases: must name at least one case")
    return list(found.values())
