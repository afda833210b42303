"""The environment for which a stored decision is valid (a GPU, and cuDNN with its frontend), and
the paths of its decisions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cudnn_autotune.core import json_dataclass, versions

NO_GPU = "none"
SUFFIX = ".json"
VERDICTS_SUFFIX = ".norms"
"""The suffix of the verdicts beside a store's file. Norms were the first that had verdicts."""
FOLDER_VARIABLE = "CUDNN_AUTOTUNE_CACHE_DIR"
_MIG = re.compile(r"(?P<gpu>.*\S)\s+MIG\s+(?P<profile>\S.*)")


@dataclass(frozen=True)
class Environment:
    """The identity of a GPU and the cuDNN libraries. A decision is used in an equal environment
    only.

    The versions of the driver and of torch are not part of it, because they do not affect which
    engines exist; ``Provenance`` records them.
    """

    gpu: str
    """The GPU's name without a MIG profile, such as ``NVIDIA H200``; ``none`` without a GPU."""
    multiprocessors: int
    """The number of multiprocessors that CUDA reports. A MIG slice has fewer than the whole GPU,
    and GPUs of one name may have different numbers."""
    compute_capability: str
    """The compute capability, such as ``9.0``; empty without a GPU."""
    mig_profile: str
    """The MIG profile, such as ``1g.18gb``; empty for a whole GPU."""
    cudnn: str
    """The version of the loaded libcudnn, such as ``9.19.0``; empty without one."""
    cudnn_frontend: str
    """The version of the cuDNN frontend that the extension was compiled with; empty without it."""

    def __post_init__(self) -> None:
        if not self.gpu:
            raise ValueError(f"gpu: must be the name of a GPU, or {NO_GPU!r}")
        if self.multiprocessors < 0:
            raise ValueError(f"multiprocessors: must be 0 or more, got {self.multiprocessors}")

    @classmethod
    def of(cls, device: int | None = None) -> Environment:
        """Returns the environment of a CUDA device (None: the current one), or of this machine if
        it has no GPU."""
        return cls.from_versions(versions.environment(device))

    @classmethod
    def from_versions(cls, found: Mapping[str, Any]) -> Environment:
        """Returns the environment that a result of :func:`cudnn_autotune.environment` describes."""
        name = str(found["gpu"] or NO_GPU)
        # torch.cuda names a slice "NVIDIA H200 MIG 1g.18gb".
        mig = _MIG.fullmatch(name)
        return cls(
            gpu=mig["gpu"] if mig else name,
            multiprocessors=int(found["multiprocessors"] or 0),
            compute_capability=str(found["compute_capability"] or ""),
            mig_profile=mig["profile"] if mig else "",
            cudnn=str(found["cudnn"] or ""),
            cudnn_frontend=str(found["cudnn_frontend"] or ""),
        )

    @property
    def file_name(self) -> str:
        """The name of the environment's file in a store's folder, such as
        ``nvidia-h200_132sm_sm90_cudnn-9.19.0_frontend-1.28.0_0123456789ab.json``. It ends in the
        digest, because two environments may have the same readable part."""
        parts = [_slug(self.gpu)]
        if self.mig_profile:
            parts.append(f"mig-{_slug(self.mig_profile)}")
        parts.append(f"{self.multiprocessors}sm")
        if self.compute_capability:
            parts.append("sm" + _slug(self.compute_capability).replace(".", ""))
        parts.append(f"cudnn-{_slug(self.cudnn)}")
        parts.append(f"frontend-{_slug(self.cudnn_frontend)}")
        return "_".join([*parts, self.digest]) + SUFFIX

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the fields."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain JSON; :meth:`from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: Any, place: str = "environment") -> Environment:
        """Returns the environment that :meth:`to_json` described. Raises ValueError that names the
        place and the allowed values."""
        return json_dataclass.decode(cls, tree, place)


def _slug(text: str) -> str:
    """Returns ``text`` reduced to the characters of a file name, or ``none`` if none remains."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "none"


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the user's store.

    It is ``CUDNN_AUTOTUNE_CACHE_DIR``, else ``$XDG_CACHE_HOME/cudnn_autotune``, else
    ``~/.cache/cudnn_autotune``. A user without a home has a folder in the temporary one.
    """
    named = environ.get(FOLDER_VARIABLE, "").strip()
    if named:
        return Path(os.path.expanduser(named))
    caches = environ.get("XDG_CACHE_HOME", "").strip()
    # The XDG Base Directory Specification says that a relative path must be ignored.
    if os.path.isabs(caches):
        return Path(caches, "cudnn_autotune")
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        return Path(tempfile.gettempdir(), f"cudnn_autotune-{os.getuid()}")
    return Path(home, ".cache", "cudnn_autotune")


def located(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """Returns ``path`` as an absolute path, with a leading ``~`` expanded. Raises TypeError that
    names ``argument`` if it is not a path."""
    try:
        return Path(os.path.expanduser(os.fsdecode(path))).absolute()
    except TypeError as error:
        raise TypeError(f"{argument} must be a path, got {path!r}") from error


def file_in(path: str | os.PathLike[str] | None, environment: Environment) -> Path:
    """Returns the path of the file with the decisions of ``environment``. ``path`` is that file, or
    a folder (None: the default one). Raises as :func:`located`."""
    place = default_folder() if path is None else located(path)
    return place if names_file(place) else place / environment.file_name


def names_file(place: Path) -> bool:
    """Returns whether ``place`` is a store's file, which need not exist, and not its folder."""
    return place.suffix == SUFFIX and not os.path.isdir(place)
