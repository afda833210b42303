"""What is compared: processes of each mode, in turns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    label: str
    sampling: str = ""
    """The package's mode; empty: PyTorch's own convolutions."""
    store: str = "off"
    """``off``; ``empty``: one of its own; ``filled``: the latest that an ``empty`` one has left."""
    is_tuned: bool = False
    """Whether ``tune`` comes before the first step; its time counts."""


MODES = {
    "heuristic": Mode("heuristic", "heuristic"),
    "auto_empty": Mode("auto, empty store", "auto", "empty"),
    "auto_filled": Mode("auto, filled store", "auto", "filled"),
    "tune": Mode("tune, then a step; empty store", "auto", "empty", is_tuned=True),
    "race_empty": Mode("race, empty store", "race", "empty"),
    "online": Mode("online", "online"),
    "pytorch_off": Mode("PyTorch, benchmark off"),
    "pytorch_on_10": Mode("PyTorch, benchmark on, limit 10"),
    "pytorch_on_0": Mode("PyTorch, benchmark on, no limit"),
}
DEFAULT = ("heuristic", "auto_empty", "auto_filled", "pytorch_off", "pytorch_on_10")
REFERENCE = "heuristic"
WARM_UP = "warm-up"


def warm_up_order(modes: list[str]) -> list[str]:
    """One of each kind: PyTorch with benchmark on comes first, since it never tunes a shape that
    was served before with benchmark off; what `off` compiles is among what it tries."""
    found: dict[str, str] = {}
    for name in sorted(modes, key=list(MODES).index, reverse=True):
        found.setdefault(MODES[name].sampling or name, name)
    return list(found.values())


def plan(modes: list[str], runs: int) -> dict[str, str]:
    """A process's name -> its mode, round by round, so that a time limit cuts off rounds and no
    mode.

    Every other round goes backwards, but a store is filled before it is used.
    """
    planned: dict[str, str] = {}
    for number in range(runs):
        order = [m for m in modes if MODES[m].store != "filled"]
        order = order if number % 2 == 0 else order[::-1]
        filled = [m for m in modes if MODES[m].store == "filled"]
        fillers = [m for m in order if MODES[m].store == "empty"]
        for mode in order:
            followers = filled if mode in fillers[-1:] else []
            planned |= {f"{one}:{number}": one for one in (mode, *followers)}
    return planned
