"""Who measured, with what, and when."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cudnn_autotune.core import versions
from cudnn_autotune.core.json_node import Node


@dataclass(frozen=True)
class Provenance:
    """For people, and to tell the later of two decisions."""

    driver: str = ""
    torch: str = ""
    cudnn_autotune: str = ""
    time: str = "1970-01-01T00:00:00.000000Z"
    """ISO 8601, UTC; kept as ``YYYY-MM-DDTHH:MM:SS.ffffffZ``, so that texts sort as times do."""
    revision: int = 0
    """Goes before ``time``: one more than that of a decision which this one has replaced though its
    time is not later, as where a clock was set back."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _utc(self.time))
        Node(self.revision, "revision").integer()

    @classmethod
    def now(cls, driver: str | None = None) -> Provenance:
        """This process, at this moment. ``driver``: the GPU's; None: to be looked up."""
        found = versions.environment()
        return cls(
            driver=(found["driver"] or "") if driver is None else driver,
            torch=found["torch"],
            cudnn_autotune=found["cudnn_autotune"],
            time=datetime.now(UTC).isoformat(),
        )

    def to_json(self) -> dict[str, Any]:
        tree = dataclasses.asdict(self)
        if not self.revision:
            del tree["revision"]
        return tree

    @classmethod
    def from_json(cls, tree: Any, place: str = "provenance") -> Provenance:
        """Raises ValueError naming the place and what is allowed there."""
        Node(tree, place).object()
        fields = Node({"revision": 0, **tree}, place).fields(
            *("driver", "torch", "cudnn_autotune", "time", "revision")
        )
        revision = fields.pop("revision").integer()
        texts = {name: node.text() for name, node in fields.items()}
        try:
            return cls(**texts, revision=revision)
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error


def utc_text(time: datetime) -> str:
    """As ``Provenance.time`` is kept."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _utc(text: str) -> str:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError("it has no time zone")
        return utc_text(time)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"time: must be ISO 8601 with a time zone, as 2025-11-21T17:28:03Z, got {text!r}"
        ) from error
