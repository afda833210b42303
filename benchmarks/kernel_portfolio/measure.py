"""Every kernel of one run-time-compiled engine against what cuDNN lists, on one problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from common import numbers
from common.turns import single_calls, take_turns

KNOB = "KERNEL_CFG"
LISTED = "listed"  # the engine's config as cuDNN's heuristics offer it, whichever kernel that is


@dataclasses.dataclass(frozen=True)
class Settings:
    values: int = 56
    """KERNEL_CFG 0 up to this, less one, are tried; cuDNN refuses those that an engine lacks."""
    rounds: int = 8
    """Half of them cold, half hot; a multiple of 4, since every order is run mirrored too."""
    leaders: int = 14
    """Kernels that take part in the rounds, the fastest of single calls."""
    rivals: int = 4
    """Listed configs that do."""
    seed: int = 0


def kernels(listed: Any, values: Iterable[int]) -> dict[str, Any]:
    """The engine's candidates by name: ``listed`` itself, and each value of KERNEL_CFG."""
    from cudnn_autotune.engines.configs import engine_text

    found = {LISTED: listed}
    for value in values:
        knobs = {**listed.knobs, KNOB: value}
        text = engine_text(listed.engine, knobs)
        if text != listed.text:
            found[str(value)] = dataclasses.replace(
                listed, knobs=knobs, text=text, heuristic_mode=""
            )
    return found


def precompiled(candidates: Any) -> list[Any]:
    """What cuDNN's heuristics A and B list, less what is compiled at run time."""
    listed = {c.text: c for mode in ("B", "A") for c in candidates.of_mode(mode)}
    return [c for c in listed.values() if c.engine is not None and not c.is_compiled]


def as_listed(candidates: Any, engine: int) -> Any | None:
    """The run-time-compiled config of ``engine`` that the heuristics list; None: they do not."""
    own = (c for c in candidates.all() if c.engine == engine and c.is_compiled)
    return next(own, None)


def measure(
    timer: Any,
    candidates: Any,
    engine: int,
    *,
    always: Collection[int] = (),
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Milliseconds a call, the geometric mean of a cold and a hot cache.

    Args:
        always: values of KERNEL_CFG that take part in the rounds however slow their first calls.

    Returns:
        ``kernels`` and ``rivals``: times from the rounds, by name and by text; ``rough``: the
        faster of two single calls of every kernel; ``tried``, ``built``, ``build_s``.

    Raises:
        ValueError: the heuristics do not list the engine, or nothing else that runs.
    """
    settings = settings or Settings()
    own = as_listed(candidates, engine)
    if own is None:
        raise ValueError(f"engine {engine} is not listed")
    named = kernels(own, range(settings.values))
    begin_ms = timer.elapsed_ms()
    built = timer.runnable(list(named.values()))
    build_s = (timer.elapsed_ms() - begin_ms) / 1e3
    rough = single_calls(timer, [*built, *timer.runnable(precompiled(candidates))])
    # Python's sort is stable: the same on every machine for equal times.
    names = sorted(
        (name for name, c in named.items() if c.text in rough), key=lambda n: rough[named[n].text]
    )
    taken = names[: settings.leaders]
    taken += [n for n in names if n not in taken and n in (LISTED, *map(str, always))]
    rivals = sorted((c for c in precompiled(candidates) if c.text in rough), key=_by(rough))
    rivals = rivals[: settings.rivals]
    if not rivals:
        raise ValueError("no listed config that needs no compilation runs")
    times = take_turns(
        timer,
        [*(named[n] for n in taken), *rivals],
        rough,
        rounds=settings.rounds,
        seed=settings.seed,
    )
    return {
        "listed": own.text,
        "tried": len(named),
        "built": len(built),
        "build_s": numbers.significant(build_s, 4),
        "kernels": {n: times[named[n].text] for n in taken if named[n].text in times},
        "rivals": {c.text: times[c.text] for c in rivals if c.text in times},
        "rough": {n: numbers.significant(rough[named[n].text]) for n in names},
    }


def _by(rough: dict[str, float]) -> Any:
    return lambda candidate: rough[candidate.text]
