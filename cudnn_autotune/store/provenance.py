"""The record of who measured a decision, with which versions, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cudnn_autotune.core import versions
from cudnn_autotune.core.json_node import Node


@dataclass(frozen=True)
class Provenance:
    """Versions and time of a measurement, for people and to find the later of two decisions."""

    driver: str = ""
    torch: str = ""
    cudnn_autotune: str = ""
    time: str = "1970-01-01T00:00:00.000000Z"
    """The time of the measurement, in ISO 8601 with a time zone. It is stored in UTC as
    ``YYYY-MM-DDTHH:MM:SS.ffffffZ``, so that the texts sort as the times do."""
    revision: int = 0
    """Takes precedence over ``time`` when two decisions are compared. A decision that replaces one
    with a later time, because a clock was set back, gets that one's revision plus one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _utc(self.time))
        Node(self.revision, "revision").integer()

    @classmethod
    def now(cls, driver: str | None = None) -> Provenance:
        """Returns the provenance of a measurement that this process makes now.

        Args:
            driver: The version of the GPU's driver; None looks it up.
        """
        found = versions.environment()
        return cls(
            driver=(found["driver"] or "") if driver is None else driver,
            torch=found["torch"],
            cudnn_autotune=found["cudnn_autotune"],
            time=datetime.now(UTC).isoformat(),
        )


def utc_text(time: datetime) -> str:
    """Returns a time as ``Provenance.time`` stores it."""
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
