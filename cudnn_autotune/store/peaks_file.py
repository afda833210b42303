"""The measured peaks of a GPU on disk: a small file beside the decisions, for any process.

The file is of a GPU, with any version of cuDNN. A file that is damaged, of another GPU or of
another version of the format is not used, and the next measurement replaces it. A file without the
mark of peaks is never changed. Peaks decide no choice.
"""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from cudnn_autotune.core import atomic_file, json_dataclass
from cudnn_autotune.core.json_node import read_json
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import disk_file, settings
from cudnn_autotune.store.decision import Provenance
from cudnn_autotune.store.environment import Environment, names_file

# Not that of a store's files, among which it lies.
SUFFIX = ".peaks"
_MARK = "cudnn_autotune peaks"
_FORMAT = f"{_MARK}, version 1"
_MOST_BYTES = 16 << 10
_BEGINNING = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredPeaks:
    """The content of a file."""

    format: str
    gpu: Environment
    """The GPU, without the versions of cuDNN and of its frontend."""
    peaks: Peaks
    provenance: Provenance
    """The latest measurement's; an earlier one may have had higher peaks."""

    def __post_init__(self) -> None:
        if self.format != _FORMAT:
            raise ValueError(f"format: must be {_FORMAT!r}, got {self.format!r}")


def gpu_of(environment: Environment) -> Environment:
    """Returns the part of an environment that peaks depend on."""
    return replace(environment, cudnn="", cudnn_frontend="")


def path_of(place: Path, environment: Environment) -> Path:
    """Returns the path of the file of a GPU beside a store, which is a folder or a file."""
    folder = place.parent if names_file(place) else place
    gpu = gpu_of(environment)
    name = gpu.file_name.partition("_cudnn-")[0]
    return folder / f"{name}_{gpu.digest}{SUFFIX}"


def find(place: Path, environment: Environment) -> MeasuredPeaks | None:
    """Returns the measured peaks of the GPU of ``environment``; None if there is no usable file."""
    path = path_of(place, environment)
    try:
        tree = read_json(path, _MOST_BYTES)
        found = json_dataclass.decode(MeasuredPeaks, tree, "file")
        if found.gpu != gpu_of(environment):
            raise ValueError("it is of another GPU")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.info("%s is not used: %s", path, error)
        return None
    return found


def keep(place: Path, environment: Environment, peaks: Peaks) -> None:
    """Writes the peaks that this process has measured; of a known peak, the better value.

    Raises:
        OSError: the file cannot be written, and is as it was. One reason is a file without the mark
            of peaks.
    """
    known = find(place, environment)
    best = known.peaks.best(peaks) if known else peaks
    content = MeasuredPeaks(_FORMAT, gpu_of(environment), best, Provenance.now())
    path = path_of(place, environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_is_ours(path)
    data = json.dumps(json_dataclass.encode(content), indent=1, allow_nan=False)
    atomic_file.write(path, f"{data}\n".encode())


def _check_is_ours(path: Path) -> None:
    path = atomic_file.followed(path)
    atomic_file.check_regular(path)
    with disk_file.opened(path) as file:
        beginning = file.read(_BEGINNING) if file else b""
    if beginning and _MARK.encode() not in beginning:
        raise OSError(errno.EEXIST, "there is a file that does not hold peaks", str(path))


def peaks_of(device: int) -> Peaks | None:
    """Returns the peaks of a CUDA device from the file beside the user's store; None if they have
    not been measured, or the store's mode is off."""
    if settings.get_store_settings().mode == "off":
        return None
    store = settings.get_store(device)
    found = find(store.path, store.environment)
    return found.peaks if found else None
