"""The command line that all scripts have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from common.environment import name_of


def parser(description: str | None, *, has_dry_run: bool = True) -> argparse.ArgumentParser:
    """A parser with ``--json``; ``description`` is printed as it is.

    Args:
        has_dry_run: adds ``--device``, for a script that can run on tiny layers on the CPU.
    """
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, help="write the record here, as it grows")
    if has_dry_run:
        p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    return p


def counts(text: str) -> list[int]:
    """``"1,10"`` as ``[1, 10]``, in order and each once; for argparse's ``type``."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"comma-separated numbers of 1 or more: {text!r}")
    return found


def some_of(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """The comma-separated values of ``text``, each once; exits where one is not allowed."""
    values = [value.strip() for value in text.split(",")]
    if unknown := [value for value in values if value not in allowed]:
        sys.exit(f"{option}: {unknown} unknown; allowed: {', '.join(allowed)}")
    return list(dict.fromkeys(values))


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Exits where an option, by its name in ``options``, is below its least value."""
    for name, value in least.items():
        if getattr(options, name) < value:
            option = name.replace("_", "-")
            sys.exit(f"--{option} must be {value} or more, got {getattr(options, name)}")


def check_gpu(script: str) -> None:
    """Exits where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"{name_of(script)} needs a CUDA GPU, and there is none here")
