#!/usr/bin/env python
"""Which configs of heuristic mode FALLBACK are worth timing? (docs/findings/fallback-mode.md)

On each layer what mode A and the first four of mode B list precompiled is called, and then what
mode FALLBACK lists; what comes near the best takes turns with it. What does without tensor cores
only runs on small layers: one launch may take a second elsewhere.

    python benchmarks/fallback_mode.py --json fallback_mode.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

FIRST_OF_B = 4
MOST_FLOPS = 5e9  # of a layer on which configs without tensor cores are run
NEAR = 1.5
CONTENDERS = 3


def least(times_ms: dict[str, float], configs: list[Any], best_ms: float) -> float | None:
    """The fastest of some configs, over the best of the other modes."""
    return min((times_ms[c.text] / best_ms for c in configs if c.text in times_ms), default=None)


def measure(case: Any) -> Iterator[investigation.Row]:
    with engines.opened(case.problem()) as (timer, candidates):
        listed = dict.fromkeys([*candidates.of_mode("B")[:FIRST_OF_B], *candidates.of_mode("A")])
        others = timer.runnable([c for c in listed if not c.is_compiled])
        rough_ms = engines.single_calls(timer, others)
        contenders = sorted(
            (c for c in others if c.text in rough_ms), key=lambda c: rough_ms[c.text]
        )
        if not contenders:
            raise RuntimeError("no precompiled config of the other modes runs")
        flops = candidates.work.flops if candidates.work is not None else 0.0
        fallback = [
            c
            for c in candidates.of_mode("FALLBACK")
            if "TENSOR_CORE" in c.numerical_notes or flops <= MOST_FLOPS
        ]
        rough_ms |= engines.single_calls(timer, timer.runnable(fallback))
        near = NEAR * rough_ms[contenders[0].text]
        racing = [c for c in fallback if rough_ms.get(c.text, near + 1) <= near]
        times_ms = engines.take_turns(timer, [*contenders[:CONTENDERS], *racing], rough_ms)
        best_ms = min(times_ms[c.text] for c in contenders[:CONTENDERS] if c.text in times_ms)
        times_ms = rough_ms | times_ms
        compiled = [c for c in fallback if c.is_compiled]
        fastest = min(racing, key=lambda c: times_ms[c.text], default=None)
        yield {
            "best of the other modes (ms)": best_ms,
            "listed by FALLBACK": len(candidates.of_mode("FALLBACK")),
            "ran": sum(c.text in rough_ms for c in fallback),
            "precompiled, over the best": least(
                times_ms, [c for c in fallback if not c.is_compiled], best_ms
            ),
            "compiled at run time, over the best": least(times_ms, compiled, best_ms),
            "fastest": fastest.text if fastest else None,
        }


if __name__ == "__main__":
    title = "What heuristic mode FALLBACK lists, over the best precompiled config of modes A and B"
    sys.exit(investigation.run(__file__, __doc__, ("/float16",), measure, title))
