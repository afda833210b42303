"""``cudnn-autotune env``."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune.cli.stores import files_of, nothing, read, store_option
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core import versions
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.unlisted import KERNEL_CFGS, kernel_cfgs
from cudnn_autotune.store import disk_file, peaks_file
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.environment import Environment, default_folder, file_in
from cudnn_autotune.store.private_folder import folder_beside
from cudnn_autotune.tools import gpu_peaks
from cudnn_autotune.tuning import settings

# The versions of README.md's figures and their records, and of the errata.
FIGURES_TORCH, FIGURES_CUDNN, ERRATA_CUDNN = (2, 11), (9, 19), (9, 19)


@click.command()
@store_option
@click.option("--measure", is_flag=True, help="Measure the GPU's peaks first.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def env(store_path: Path | None, measure: bool, as_json: bool) -> None:
    """Show what identifies this machine's decisions, where they are kept, and what is in force.

    Peaks that are measured again stay the best that were ever measured: a busy GPU is slower.
    """
    if store_path is not None:
        store_path = store_path.absolute()
    if measure:
        _measure(store_path)
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(settings.PREFIX)}
    facts = {
        "environment": Environment.of().to_json(),
        "store": _store(store_path),
        "compiled plans": _compiled_plans(store_path),
        "peaks": _peaks(store_path),
        "versions": versions.environment(),
        "known": _known(),
        "settings": _settings(),
        "variables": variables,
        "not understood": settings.not_understood(variables),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for title, values in facts.items():
        click.echo(f"{title}:")
        width = max(map(len, values), default=0)
        for name, value in values.items():
            say(f"  {name:<{width}}  {_text(value)}")
        if not values:
            click.echo("  none")


def _store(store_path: Path | None) -> dict[str, Any]:
    here = Environment.of()
    path = file_in(store_path, here)
    found: dict[str, Any] = {"path": str(path), "decisions": 0, "bytes": 0}
    if os.path.exists(path):
        try:
            file = read(path, nothing)
            found |= {"decisions": file.count, "bytes": file.size}
            if file.environment != here:
                found["of another environment"] = file.environment.file_name
            if file.complaints:
                found["not readable"] = list(file.complaints)
        except ValueError as error:
            found["not readable"] = [str(error)]
    if store_settings.is_written() and not disk_file.is_writable(path):
        found["cannot be written"] = str(path)
    wanted = dataclasses.replace(store_settings.get_store_settings(), path=store_path)
    if why := store_settings.why_not_locked(wanted, here):
        found["cannot be locked"] = why
    try:
        found["other files"] = [file.name for file in files_of(store_path) if file != path]
    except click.BadParameter as error:
        found["not readable"] = [*found.get("not readable", []), error.message]
    return found


def _compiled_plans(store_path: Path | None) -> dict[str, Any]:
    folder = folder_beside(store_path or default_folder())
    files = folder.entries()
    return {"path": str(folder.path), "files": len(files), "bytes": sum(f.size for f in files)}


def _measure(store_path: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.UsageError("--measure needs a CUDA GPU, and there is none here")
    if not store_settings.is_written():
        raise click.UsageError("--measure: the store's mode forbids to keep what is measured")
    if gpu_peaks.measured(store_path or default_folder(), Environment.of()) is None:
        raise click.ClickException("nothing was measured")


def _peaks(store_path: Path | None) -> dict[str, Any]:
    """The measured peaks of the GPU that is here, in units that people use."""
    place, here = store_path or default_folder(), Environment.of()
    found: dict[str, Any] = {"path": str(peaks_file.path_of(place, here))}
    measured = peaks_file.find(place, here)
    if measured is None:
        return found | {"measured": "no" if torch.cuda.is_available() else "no: there is no GPU"}
    peaks = measured.peaks
    rates = {f"{name}, TFLOPS": f / 1e9 for name, f in peaks.flops_per_ms.items()}
    rates = {"memory, GB/s": peaks.bytes_per_ms / 1e6, **rates, "launch, us": peaks.launch_ms * 1e3}
    found |= {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return found | {"measured": measured.provenance.time}


def _known() -> dict[str, str]:
    """Says with which versions knowledge was measured, and whether it is in force here."""
    if not extension_available():
        return {}
    number = _C.cudnn_runtime_version()
    here = number // 10000, number // 100 % 100

    def found_with(known: tuple[int, int], is_in_force: bool) -> str:
        text = f"found with cuDNN {_dotted(known)}, {'' if is_in_force else 'not '}in force"
        return (
            text if here == known else f"{text} in {_dotted(here)}, with which they were not tried"
        )

    figures = (
        f"of torch {_dotted(FIGURES_TORCH)} and cuDNN {_dotted(FIGURES_CUDNN)}, on H100 and H200"
    )
    return {
        "figures of the documents": figures,
        "wrong engines": found_with(ERRATA_CUDNN, here >= ERRATA_CUDNN),
        "engines that auto prefers": found_with(max(KERNEL_CFGS), bool(kernel_cfgs(number))),
    }


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _settings() -> dict[str, Any]:
    store = dataclasses.asdict(store_settings.get_store_settings())
    return {
        "sampling": settings.get_sampling(),
        "workspace_limit": settings.get_workspace_limit(),
        "benchmark_limit": settings.get_benchmark_limit(),
        "budget_ms": settings.get_budget_ms(),
        "new_shapes": settings.get_new_shapes(),
        "store mode": store["mode"],
        "shipped": [str(path) for path in store["shipped"]],
    }


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"
