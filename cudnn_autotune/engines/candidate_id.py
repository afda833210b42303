"""The identity of a candidate: the parts of its text.

No other module looks into the text of a candidate. :func:`identify` takes any text, because a store
may have any. :func:`parse` refuses texts that cannot name an implementation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.json_node import shown

Kind = Literal["aten", "matmul", "engine", "unfused", "implementation"]

UNFUSED = "unfused:"
"""The beginning of an engine config's text if a problem has a bias and the engine computes the
convolution alone (csrc/core/cudnn/engine_config.h)."""
_NUMBERED = "KNOB_"
"""The beginning of a knob that had no name when its text was written
(csrc/core/cudnn/detail/knob_names.h)."""
_MOST = 200
"""The most characters of a version, and of settings."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}", re.ASCII)
_VERSION = re.compile(rf"[!-9;-?A-~]{{1,{_MOST}}}")  # printable ASCII but blanks, ':' and '@'
_SETTINGS = re.compile(rf"[!-~]{{0,{_MOST}}}")
# The beginnings of the texts of other candidates.
_RESERVED = re.compile(r"aten|matmul|unfused|eng[0-9]*")
_CONFIG = re.compile(r"eng(\d{1,18})(?::(\w+=-?\d{1,18}(?:,\w+=-?\d{1,18})*))?", re.ASCII)


class CandidateId(NamedTuple):
    """The parts of the text of a candidate."""

    kind: Kind
    """``engine`` is a config of cuDNN's, and any text of no other kind. ``unfused`` is a config of
    the convolution alone."""
    name: str
    """``eng67``, ``aten``, ``matmul``, or the name of an implementation."""
    version: str = ""
    """The version of an implementation."""
    settings: str = ""
    """The knobs of an engine, or the settings of an implementation."""

    @property
    def text(self) -> str:
        if self.kind == "implementation":
            name = f"{self.name}@{self.version}"
        else:
            name = f"{UNFUSED if self.kind == 'unfused' else ''}{self.name}"
        return f"{name}:{self.settings}" if self.settings else name

    @property
    def is_implementation(self) -> bool:
        return self.kind == "implementation"

    @property
    def is_engine(self) -> bool:
        """Whether cuDNN builds it, if anything does."""
        return self.kind in ("engine", "unfused")

    @property
    def is_own_path(self) -> bool:
        """Whether a function of PyTorch's computes it: convolution, or matrix product."""
        return self.kind in ("aten", "matmul")

    @property
    def is_rewrite(self) -> bool:
        """Whether an implementation runs an engine of cuDNN on another problem."""
        return self.is_implementation and self.settings.startswith("eng")


@lru_cache(maxsize=4096)
def identify(text: str) -> CandidateId:
    """Takes the text of a candidate apart, as csrc/plan/build_plan.cpp does."""
    own_path: Kind | None = "aten" if text == "aten" else "matmul" if text == "matmul" else None
    if own_path is not None:
        return CandidateId(own_path, text)
    if "@" in text:
        return _implementation(text)
    kind: Kind = "unfused" if text.startswith(UNFUSED) else "engine"
    name, _, settings = text.removeprefix(UNFUSED).partition(":")
    return CandidateId(kind, name, "", settings)


def parse(text: str) -> CandidateId:
    """Takes the text of an implementation's candidate apart; raises ValueError if it is none."""
    found = _implementation(text)
    try:
        check_name(found.name)
        check_version(found.version)
        check_settings(found.settings)
        if text.endswith(":") and not found.settings:
            raise ValueError("settings must not be empty behind a ':'")
    except ValueError as error:
        raise ValueError(f"{shown(text)} is not name@version[:settings]: {error}") from None
    return found


def _implementation(text: str) -> CandidateId:
    name, _, rest = text.partition("@")
    version, _, settings = rest.partition(":")
    return of_implementation(name, version, settings)


def of_implementation(name: str, version: str, settings: str = "") -> CandidateId:
    """Returns the identity of a candidate of an implementation."""
    return CandidateId("implementation", name, version, settings)


@lru_cache(maxsize=4096)
def config_of(text: str) -> tuple[int | None, Mapping[str, int]]:
    """Returns the number and the knobs of a text's engine; None and no knobs if it names none."""
    match = _CONFIG.fullmatch(text.removeprefix(UNFUSED))
    if match is None:
        return None, {}
    knobs = (knob.split("=") for knob in match[2].split(",")) if match[2] else ()
    return int(match[1]), {name: int(value) for name, value in knobs}


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """Returns the text that this version writes for the candidate that a text names.

    Earlier versions wrote a knob without a name by its number, ``KNOB_44``. The text of another
    kind of candidate stays as it is.
    """
    if _NUMBERED not in text or not extension_available():
        return text
    found = identify(text)
    if found.is_rewrite:
        return found._replace(settings=canonical(found.settings)).text
    if not found.is_engine:
        return text
    try:
        return _C.canonical_engine_text(text)
    except ValueError:
        return text


def check_name(name: object) -> str:
    """Returns the name of an implementation; raises ValueError if it is not allowed."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ValueError(
            "name must be an identifier in lower case of at most 64 characters, and not 'aten', "
            f"'matmul', 'unfused' or 'eng' with a number, got {shown(name)}"
        )
    return name


def check_version(version: object) -> str:
    """Returns the version of an implementation; raises ValueError if it is not allowed."""
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ValueError(
            f"version must be a text of 1 to {_MOST} printable ASCII characters without blanks, "
            f"':' and '@', got {shown(version)}"
        )
    return version


def check_settings(settings: object) -> str:
    """Returns the settings of an offer; raises ValueError if they are not allowed."""
    if not isinstance(settings, str) or not _SETTINGS.fullmatch(settings):
        raise ValueError(
            f"settings must be a text of at most {_MOST} printable ASCII characters without "
            f"blanks, got {shown(settings)}"
        )
    return settings
