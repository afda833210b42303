"""A locked store is the authority: what it lacks is computed by PyTorch, and nothing is measured.

Here are the check that a store can be locked, and the count of what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.store import disk_file, file_format
from cudnn_autotune.store.environment import SUFFIX, VERDICTS_SUFFIX, Environment, names_file
from cudnn_autotune.store.notices import warn_once

REASON = "the locked store does not have it"
"""The reason in reports and records of what a locked store lacks."""

_COUNTED = "not in the locked store: "
_WAY_OUT = 'tune once with mode="read_write" (CUDNN_AUTOTUNE_CACHE=read_write)'
_MOST_HEADER_BYTES = 1 << 16
_MOST_NAMED = 3


def missed(kind: str, text: str) -> None:
    """Counts in ``fallbacks()`` that a locked store lacks something, and warns once in a process.

    Args:
        kind: what it is, in the plural, such as ``convolutions``.
        text: its name in the warning.
    """
    _C.count_fallback(f"{_COUNTED}{kind}")
    warn_once(
        "locked",
        f"the locked store lacks {kind}, the first is {text}: PyTorch computes what it lacks, and "
        f"cudnn_autotune.fallbacks() counts it; {_WAY_OUT}",
    )


def is_miss(reason: str) -> bool:
    """Returns whether a reason of ``fallbacks()`` counts what a locked store lacks."""
    return reason.startswith(_COUNTED)


def known_environment() -> Environment | None:
    """Returns the current device's environment; None if CUDA had to be initialised for that, after
    which a process cannot be forked."""
    is_known = torch.cuda.is_initialized() or not torch.cuda.is_available()
    return Environment.of() if is_known else None


def refusal(places: Sequence[tuple[str, Path]], here: Environment | None) -> str:
    """Returns a sentence on why no place is a store that can be locked; empty if one can.

    Args:
        places: the name of the setting, and the folder or file that it names.
        here: the environment of the process; None: any with this version of cuDNN.
    """
    found = [(name, path, _fault(path, here)) for name, path in places]
    if not all(fault for _, _, fault in found):
        return ""
    name, path, fault = found[0]
    return f"{name}: a locked store must be of this GPU and cuDNN, and {path} {fault}; {_WAY_OUT}"


def _fault(place: Path, here: Environment | None) -> str:
    """Returns what keeps a folder or file from being locked, behind its name; empty if nothing."""
    try:
        if not os.path.exists(place):
            return "does not exist"
        files = [place]
        if not names_file(place):
            suffixes = (SUFFIX, VERDICTS_SUFFIX)
            files = [place / name for name in sorted(os.listdir(place)) if name.endswith(suffixes)]
        faults = [_fault_of_file(file, place, here) for file in files]
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if not faults:
        return "has no decisions"
    return "" if "" in faults else "; ".join([*dict.fromkeys(faults)][:_MOST_NAMED])


def _fault_of_file(file: Path, place: Path, here: Environment | None) -> str:
    with disk_file.opened(file) as opened:
        head = b"" if opened is None else opened.readline(_MOST_HEADER_BYTES)
    content = file_format.decode(head)
    own = content.environment
    if own is None:
        which = "" if file == place else f"holds {file.name}, which "
        return f"{which}cannot be read ({content.why})"
    if here is None:
        number = _C.cudnn_runtime_version()
        cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        is_here = (own.cudnn, own.cudnn_frontend) == (cudnn, _C.cudnn_frontend_version())
        wanted = f"cuDNN {cudnn}"
    else:
        is_here, wanted = own == here, _described(here)
    return "" if is_here else f"is of {_described(own)}, not of {wanted}"


def _described(one: Environment) -> str:
    profile = f" {one.mig_profile}" if one.mig_profile else ""
    return (
        f"{one.gpu}{profile} ({one.multiprocessors} multiprocessors) with cuDNN "
        f"{one.cudnn or 'none'}, frontend {one.cudnn_frontend or 'none'}"
    )
