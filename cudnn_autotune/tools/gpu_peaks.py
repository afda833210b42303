"""The peaks of a GPU, kept beside the store or measured."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import peaks_file
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.environment import Environment, default_folder
from cudnn_autotune.timers import peaks

__all__ = ["HOW", "known", "known_or_measured", "measured"]

HOW = "`cudnn-autotune env --measure` measures them on the GPU"


def known(place: Path, environment: Environment) -> Peaks | None:
    """Returns the peaks that were measured; None if they were not."""
    found = peaks_file.find(place, environment)
    return found.peaks if found else None


def known_or_measured(
    place: Path | None = None, environment: Environment | None = None
) -> Peaks | None:
    """Returns the peaks as :func:`known` does; measures them if they are not known, and the GPU
    is here.

    Args:
        place: a store's folder; None stands for the user's.
        environment: names the GPU; None stands for the first one of this machine.
    """
    place = place or store_settings.get_store_settings().path or default_folder()
    environment = environment or Environment.of(0)
    found = known(place, environment)
    if found is None and torch.cuda.is_available():
        here = Environment.of()
        if peaks_file.gpu_of(here) == peaks_file.gpu_of(environment):
            return measured(place, here)
    return found


def measured(place: Path, here: Environment) -> Peaks | None:
    """Measures the current CUDA device and keeps the result, unless the store's mode forbids it.
    A failure is a warning; None if nothing could be measured."""
    try:
        found = peaks.measure()
    except RuntimeError as error:
        warnings.warn(f"the peaks of {here.gpu} cannot be measured: {error}", stacklevel=2)
        return None
    if store_settings.is_written():
        try:
            peaks_file.keep(place, here, found)
        except OSError as error:
            warnings.warn(f"the peaks of {here.gpu} cannot be written: {error}", stacklevel=2)
    return found
