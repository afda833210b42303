"""How far each pick is from the best of its layer, as the judge has timed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import numbers
from common.tables import number

NEAR = 1.01
ALL = "all"


def truths(case: dict[str, Any]) -> dict[str, Any]:
    """``burst cold``, ``burst hot`` and their mean ``burst`` as ``audit.model.Truth``; empty where
    the case was not judged."""
    from cudnn_autotune.audit.analysis import truth_of
    from cudnn_autotune.audit.model import BURST, Oracle
    from cudnn_autotune.core import json_dataclass

    if "oracle" not in case:
        return {}
    found = json_dataclass.decode(Oracle, case["oracle"])
    mean = truth_of(found, BURST)
    return {} if mean is None else {**found.truths, BURST: mean}


class Judged:
    """Regrets of every pick, of the cases that were judged."""

    def __init__(self, results: dict[str, Any]) -> None:
        cases = results.get("cases", {})
        known = {name: truths(case) for name, case in cases.items()}
        self.truths = {name: found for name, found in known.items() if found}
        self.cases = {name: cases[name] for name in self.truths}

    def regret(self, name: str, told: dict[str, Any] | None, truth: str = "burst") -> float | None:
        """A pick's time over the best of the case, 1.0 where that is within the error; None:
        nothing was picked, or it does not run."""
        from cudnn_autotune.audit.analysis import regret

        return regret(self.truths[name].get(truth), (told or {}).get("text"))

    def arm(self, arm: str, truth: str = "burst") -> dict[str, float | None]:
        """Case -> regret of the arm's pick."""
        return {n: self.regret(n, c["picks"].get(arm), truth) for n, c in self.cases.items()}

    def compared(self, arms: Sequence[str], op: str = ALL) -> list[str]:
        """The cases of an operation for which all of the arms have a pick that was judged."""
        rows = [self.arm(arm) for arm in arms]
        return [
            name
            for name, case in self.cases.items()
            if op in (ALL, case["op"]) and all(row[name] is not None for row in rows)
        ]

    def regrets(self, arm: str, names: Sequence[str], truth: str = "burst") -> list[float]:
        """Of these cases, those that were judged."""
        row = self.arm(arm, truth)
        return [regret for name in names if (regret := row[name]) is not None]

    def wall_ms(self, arm: str, names: Sequence[str]) -> list[float]:
        return [self.cases[name]["picks"][arm]["wall_ms"] for name in names]


def spread(regrets: Sequence[float]) -> tuple[str, str, str, str]:
    """Geometric mean, p95, worst, share within 1 %."""
    near = sum(regret <= NEAR for regret in regrets) / len(regrets)
    return (
        f"{numbers.geometric_mean(regrets):.4f}",
        number(numbers.quantile(regrets, 0.95)),
        number(max(regrets)),
        f"{near * 100:.0f} %",
    )
