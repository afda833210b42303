"""The choices of this process, and their cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import numbers


def choices_made() -> dict[str, Any]:
    """Returns the counts of this process's choices, their origins, timed launches and milliseconds,
    and the calls that PyTorch served."""
    import cudnn_autotune as ca

    made = ca.choices()
    tuned = [choice for choice in made if choice.origin == "tuned"]
    return {
        "made": len(made),
        "from": dict(Counter(choice.origin for choice in made)),
        "timed_launches": sum(choice.total_samples for choice in tuned),
        "choosing_ms": numbers.significant(sum(choice.tuning_ms for choice in made)),
        "by_pytorch": ca.fallbacks(),
    }
