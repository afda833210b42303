"""Who measured, with what, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cudnn_autotune import versions
from cudnn_autotune.json_node import Node


@dataclass(frozen=True)
class Provenance:
    """For people, and to tell the later of two decisions."""

    driver: str = ""
    torch: str = ""
    cudnn_autotune: str = ""
    time: str = "1970-01-01T00:00:00.000000Z"
    """ISO 8601, UTC; kept as ``YYYY-MM-DDTHH:MM:SS.ffffffZ``, so that texts sort as times do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _utc(self.time))

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
        return {
            "driver": self.driver,
            "torch": self.torch,
            "cudnn_autotune": self.cudnn_autotune,
            "time": self.time,
        }

    @classmethod
    def from_json(cls, tree: Any, place: str = "provenance") -> Provenance:
        """Raises ValueError naming the place and what is allowed there."""
        fields = Node(tree, place).fields("driver", "torch", "cudnn_autotune", "time")
        texts = {name: node.text() for name, node in fields.items()}
        try:
            return cls(**texts)
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
