"""The compared processes of each mode, in turns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    label: str
    sampling: str = ""
    """The package's mode; empty: PyTorch's own convolutions."""
    store: str = "off"
    """``off``; ``empty``: one of its own; else the mode whose latest process has left it."""
    is_tuned: bool = False
    """Whether ``tune`` comes before the first step; its time counts."""
    is_compiled: bool = False
    """Whether ``torch.compile`` gets the model, with this package's backend."""


MODES = {
    "heuristic": Mode("heuristic", "heuristic"),
    "auto_empty": Mode("auto, empty store", "auto", "empty"),
    "auto_filled": Mode("auto, filled store", "auto", "auto_empty"),
    "tune": Mode("tune, then a step; empty store", "auto", "empty", is_tuned=True),
    "race_empty": Mode("race, empty store", "race", "empty"),
    "compiled_empty": Mode("backend, empty store", "auto", "empty", is_compiled=True),
    "compiled_filled": Mode("backend, filled store", "auto", "compiled_empty", is_compiled=True),
    "online": Mode("online", "online"),
    "pytorch_off": Mode("PyTorch, benchmark off"),
    "pytorch_on_10": Mode("PyTorch, benchmark on, limit 10"),
    "pytorch_on_0": Mode("PyTorch, benchmark on, no limit"),
}
DEFAULT = ("heuristic", "auto_empty", "auto_filled", "pytorch_off", "pytorch_on_10")
REFERENCE = "heuristic"
WARM_UP = "warm-up"


def warm_up_order(modes: list[str]) -> list[str]:
    """One of each kind but compiled ones, which have caches of their own. PyTorch with benchmark on
    comes first, since it never tunes a shape that was served before with benchmark off; what `off`
    compiles is among what it tries."""
    found: dict[str, str] = {}
    for name in sorted(modes, key=list(MODES).index, reverse=True):
        if not MODES[name].is_compiled:
            found.setdefault(MODES[name].sampling or name, name)
    return list(found.values())


def plan(modes: list[str], runs: int) -> dict[str, str]:
    """A process's name -> its mode, round by round, so that a time limit cuts off rounds and no
    mode.

    Every other round goes backwards, but a store is filled before it is used.
    """
    planned: dict[str, str] = {}
    for number in range(runs):
        order = [m for m in modes if MODES[m].store not in MODES]
        for mode in order if number % 2 == 0 else order[::-1]:
            followers = [m for m in modes if MODES[m].store == mode]
            planned |= {f"{one}:{number}": one for one in (mode, *followers)}
    return planned
