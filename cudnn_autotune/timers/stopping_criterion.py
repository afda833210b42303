"""The interface of all stopping criteria, which decide whether enough samples were taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Generic, TypeVar

_MeasurementT = TypeVar("_MeasurementT", contravariant=True)


class Reason(Enum):
    """The reason why sampling ended."""

    DECIDED = "decided"
    """More samples would hardly change the decision."""
    LIMIT = "limit"
    """The criterion's own limit of rounds, passes or GPU time is reached."""
    BUDGET = "budget"
    """The caller's budget of wall time does not allow more samples."""


class StoppingCriterion(ABC, Generic[_MeasurementT]):
    """The rule that decides when enough samples were taken.

    The caller adds each portion of samples by :meth:`add_measurement`, and goes on sampling until
    :meth:`is_finished` returns True. The interface is that of nvbench's stopping criteria.
    """

    reason: Reason | None = None
    """The reason why sampling may end; None while it must go on."""

    @abstractmethod
    def add_measurement(self, measurement: _MeasurementT) -> None:
        """Adds the newest portion of samples and updates :attr:`reason`."""

    def is_finished(self) -> bool:
        """Returns whether the measurements so far are enough."""
        return self.reason is not None
