"""``cudnn-autotune audit`` on the GPU that is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune.audit import layers, record_file
from cudnn_autotune.audit.config import AuditConfig, OracleSettings
from cudnn_autotune.audit.model import PEAKS, PYTORCH_MODES, Record
from cudnn_autotune.audit.processes import ProcessFailure
from cudnn_autotune.audit.schedule import Session
from cudnn_autotune.cli import gpu_peaks, options
from cudnn_autotune.core.json_dataclass import encode
from cudnn_autotune.store import Environment
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.folder import default_folder
from cudnn_autotune.timers.telemetry import Gpu, Telemetry


def audit_gpu(fresh: Record, modes: Sequence[str], given: dict[str, Any]) -> Record:
    """Continues the record in ``given["json_path"]``, or fills ``fresh``."""
    with options.refusing("--layers"):
        listed = layers.load(given["layers"])
    with options.refusing("--cases"):
        cases = layers.select(listed, given["cases"], given["share"] or (1, 1))
    if not cases:
        raise options.refuse("--share", "leaves none of the cases")
    config = AuditConfig(
        runs=fresh.settings["runs"],
        pytorch=[mode for mode in modes if mode in PYTORCH_MODES],
        reference=_reference(fresh.settings["runs"]),
        oracle=OracleSettings(solo=given["sustained"] or "never", seed=given["seed"]),
        budget_ms=given["budget_ms"],
        time_limit_s=given["time_limit"],
        modules=given["modules"],
    )
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA GPU here; --replay RECORDING works without one")
    fresh.settings |= {
        "reference": config.reference,
        "oracle": dataclasses.asdict(config.oracle),
        "layers": Path(given["layers"]).name if given["layers"] else None,
        "cases": given["cases"],
        "share": given["share"],
        "time_limit_s": config.time_limit_s,
    }
    gpu = Gpu.of(0)
    fresh.environment |= {k: v for k, v in gpu.fixed().items() if v is not None}
    place = store_settings.get_store_settings().path or default_folder()
    if (peaks := gpu_peaks.known_or_measured(place, Environment.of(0))) is not None:
        fresh.environment[PEAKS] = encode(peaks)
    fresh.cases = {case.id: encode(case) for case in cases}
    path: Path | None = given["json_path"]
    with options.refusing("--json"):
        record = record_file.resumed(path, fresh)
    with Telemetry(gpu) as telemetry:

        def tell(line: str) -> None:
            click.echo(line, err=True)

        def save() -> None:
            record.telemetry = telemetry.summary()
            _save(record, path, tell)

        session = Session(config, record, [case.id for case in cases], save, tell)
        try:
            session.run()
        except ProcessFailure as error:
            raise click.ClickException(f"the audit cannot start: {error}") from error
    return record


def _save(record: Record, path: Path | None, tell: Callable[[str], None]) -> None:
    """Saves the record during the audit. An error is only reported, since ``audit`` saves again at
    the end."""
    try:
        if path is not None:
            record_file.save(record, path)
    except OSError as error:
        tell(f"--json: cannot write {path} now: {error.strerror or error}")


def _reference(runs: dict[str, int]) -> str:
    if not runs:
        raise options.refuse("--modes", "PyTorch's modes need one of ours to be compared with")
    return "auto" if "auto" in runs else list(runs)[-1]
