"""The peaks of the GPU that a command is about: read, or measured if that GPU is here."""

from __future__ import annotations

from pathlib import Path

import torch

from cudnn_autotune.cli.terminal import say
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import Environment, peaks_file
from cudnn_autotune.store import settings as store_settings

HOW = "`cudnn-autotune env --measure` measures them on the GPU"


def known(place: Path, environment: Environment) -> Peaks | None:
    """The peaks that were measured; None if they were not."""
    found = peaks_file.find(place, environment)
    return found.peaks if found else None


def known_or_measured(place: Path, environment: Environment) -> Peaks | None:
    """Returns the peaks as :func:`known` does; measures them if they are not known, and the GPU
    is here."""
    found = known(place, environment)
    if found is None and torch.cuda.is_available():
        here = Environment.of()
        if peaks_file.gpu_of(here) == peaks_file.gpu_of(environment):
            return measured(place, here)
    return found


def measured(place: Path, here: Environment) -> Peaks | None:
    """Measures the current CUDA device and keeps the result, unless the store's mode forbids it.
    What goes wrong is said on standard error; None if nothing could be measured."""
    from cudnn_autotune.timers import peaks

    try:
        found = peaks.measure()
    except RuntimeError as error:
        say(f"the peaks of {here.gpu} cannot be measured: {error}", err=True)
        return None
    if store_settings.is_written():
        try:
            peaks_file.keep(place, here, found)
        except OSError as error:
            say(f"the peaks of {here.gpu} cannot be written: {error}", err=True)
    return found
