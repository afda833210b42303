#!/usr/bin/env python
"""Layers of well-known networks: how far from the fastest are the sampling modes' picks, what do
they cost, and how does PyTorch compare?

Runs `cudnn-autotune audit`, with all of its options, on benchmarks/layers.json. The record also
names its code and command, so that it can be published. An existing record is continued.

\b
    python benchmarks/audit_layers.py --json audit.json --plot audit.png
    python benchmarks/audit_layers.py --replay h200_forum    (a dry run, without a GPU)

Without --modes: auto, race, sample_once, till_stable, heuristic and PyTorch's three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from common.environment import environment

from cudnn_autotune.audit.command import audit
from cudnn_autotune.audit.model import PYTORCH_MODES

LAYERS = Path(__file__).with_name("layers.json")
MODES = ("auto", "race", "sample_once", "till_stable", "heuristic")
# A published record's fields beside the audit's own.
PROVENANCE = ("device", "package", "commit", "dirty", "command", "cpu", "cpu_count")


@click.command(params=list(audit.params), help=__doc__)
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    path = given["json_path"]
    is_dry_run = bool(given["replayed"])
    if is_dry_run and path is not None and "results" in path.resolve().parts:
        raise click.UsageError(f"{path}: a dry run (--replay) is not recorded under results/")
    if given["modes"] is None:
        given["modes"] = MODES if is_dry_run else (*MODES, *PYTORCH_MODES)
    if given["layers"] is None and not is_dry_run:
        given["layers"] = str(LAYERS)
    known = environment("cpu" if is_dry_run else "cuda")
    ctx.obj = {key: known[key] for key in PROVENANCE}
    ctx.invoke(audit, **given)


if __name__ == "__main__":
    main()
