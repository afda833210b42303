"""What the caller of the backend may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cudnn_autotune.nn.models.judging import JUDGES
from cudnn_autotune.tuning.settings import check_policy


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(backend="cudnn_autotune")``, checked."""

    sampling: str | None = None
    workspace_limit: int | None = None
    freezing: bool = False
    compare: bool = True
    fuse: str = "measure"
    memory_format: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Those of Inductor, the ones that ``mode`` stands for included."""

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """What ``torch.compile`` was given.

        Raises:
            ValueError: an option is unknown, or its value not allowed.
        """
        import torch._inductor

        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        if mode not in (None, "default"):
            theirs.update(torch._inductor.list_mode_options(mode))
        known = set(torch._inductor.list_options())
        own = {field.name for field in fields(cls)} - {"inductor"}
        for key, value in (options or {}).items():
            name = key.replace("-", "_") if isinstance(key, str) else None
            if name is None or name not in own | known:
                raise ValueError(
                    f"options must be {', '.join(sorted(own))} or Inductor's "
                    f"(torch._inductor.list_options()), got {key!r}"
                )
            (ours if name in own else theirs)[name] = value
        _check(ours)
        return cls(**ours, inductor=theirs)


def _check(options: Mapping[str, Any]) -> None:
    """Raises ValueError if a value is not allowed."""
    for name in ("freezing", "compare"):
        if not isinstance(options.get(name, True), bool):
            raise ValueError(f"options[{name!r}] must be True or False, got {options[name]!r}")
    for name, allowed in (("fuse", tuple(JUDGES)), ("memory_format", (None, "auto"))):
        if name in options and options[name] not in allowed:
            text = ", ".join(map(repr, allowed))
            raise ValueError(f"options[{name!r}] must be one of {text}, got {options[name]!r}")
    if options.get("memory_format") == "auto" and not options.get("compare", True):
        raise ValueError(
            "options['memory_format'] must be None where options['compare'] is False: 'auto' "
            "compares programs in both layouts"
        )
    check_policy(options.get("sampling"), options.get("workspace_limit"))
