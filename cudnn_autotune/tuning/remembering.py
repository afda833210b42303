"""Known choices, looked up before a search, and new ones, committed after it.

:func:`find` asks the pins, then the agreement of ranks, then the store. :func:`commit` is the only
writer of new choices: it records them in the log, stores them and announces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cudnn_autotune.core.fork_safe_lock import IMPORTING, ForkSafeLock
from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision, key_of
from cudnn_autotune.tuning import choice_log, deferred, events, made_ahead
from cudnn_autotune.tuning.choice import Choice, untimed
from cudnn_autotune.tuning.pins import pinned

_lock = ForkSafeLock()
_agreed: dict[tuple[int, str], Decision] = {}
_retuned: set[ConvProblem] = set()
_forgotten_with: list[Callable[[], None]] = []


def find(problem: ConvProblem, policy: Policy, device: int) -> Choice | None:
    """Returns the known choice for ``problem`` under a policy; None if a search must decide.

    Calls of a probe find pins only.
    """
    if (text := pinned(problem)) is not None:
        decision = untimed(problem, policy, Measurement(named(text), None, 0))
        return Choice(decision, device, "pinned")
    with _lock:
        if policy.probe is not None or problem in _retuned:
            return None
        agreed = _agreed.get((device, key_of(problem, policy)))
    if found := agreed and agreed.restricted_to(problem.deterministic, policy.workspace):
        return Choice(found, device, "agreed")
    store = _store()
    found = store and store.find(problem, policy, device)
    return Choice(found, device, "store") if found else None


def _store(*, if_off: bool = False) -> Any:
    """Returns the module ``stored``, which is imported at a store's first use; None if the store's
    mode is ``off``, unless ``if_off``."""
    if store_settings.get_store_settings().mode == "off" and not if_off:
        return None
    with IMPORTING:
        from cudnn_autotune.tuning import stored
    return stored


def reject(known: Choice, *, varies: bool = False) -> None:
    """Removes a known choice that cannot serve on its device: :func:`find` must not prefer it to
    the choice of the coming search. A pin stays.

    Args:
        varies: whether its only fault is that it differs from run to run.
    """
    if known.origin == "pinned":
        return
    if known.origin == "agreed":
        with _lock:
            _agreed.pop((known.device, known.decision.key), None)
    if store := _store():
        store.reject(known, varies=varies)


def checked_error(known: Choice) -> float | None:
    """Returns the error of an output that a process of this user has found right; else None."""
    store = _store()
    return store.checked_error(known) if store else None


def read_ahead(known: Choice) -> None:
    """Begins to read back the compiled plans of the decisions around a stored one."""
    if store := _store():
        store.read_ahead(known)


def similar(problem: ConvProblem, device: int) -> list[Candidate]:
    """Returns the candidates chosen for the problems nearest to ``problem``, in this order."""
    found: dict[str, Candidate] = {}
    for decision in nearest(problem, device):
        if decision.chosen is not None:
            found.setdefault(decision.chosen.candidate.text, decision.chosen.candidate)
    return list(found.values())


def nearest(problem: ConvProblem, device: int, most: int = 3) -> list[Decision]:
    """Returns up to ``most`` stored decisions for the nearest problems, in this order."""
    store = _store()
    return store.nearest(problem, device, most) if store else []


def commit(choice: Choice, since: int | None = None) -> None:
    """Records a choice, stores it if it was measured here and is final, and announces it. Records
    its right and wrong outputs, too. Does nothing if its problem was forgotten since.

    Args:
        since: the problem's ``choice_log.generation`` when the choice was begun; None stands for
            the current one.
    """
    if not choice_log.record(choice, since):
        return
    # It is announced before changes that may wait for the lock of a file.
    deferred.change(partial(events.announce, choice))
    # A wrong output withdraws this process's record of it in any mode.
    if store := _store(if_off=bool(choice.rejected)):
        store.add_checks(choice)
        if choice.origin == "tuned":
            deferred.change(partial(store.add, [choice.decision], choice.device))


def install(decisions: Iterable[Decision], device: int) -> None:
    """Makes the ranks' agreed decisions serve their problems on ``device`` from now on, and stores
    the final ones. A provisional one serves this process to its end: ranks that tuned it again
    would choose differently."""
    decisions = list(decisions)
    with _lock:
        for decision in decisions:
            _agreed[device, decision.key] = decision
    for decision in decisions:
        choice_log.forget_problem(decision.problem)
        choice_log.record(Choice(decision, device, "agreed"))
    if store := _store():
        store.add(decisions, device)


def forget() -> None:
    """Clears all choices, built plans, counts and the ranks' agreement: the next call of each shape
    looks them up again. Pins and stores are not touched."""
    with _lock:
        _agreed.clear()
    made_ahead.clear()
    choice_log.forget()
    for forget_more in _forgotten_with:
        forget_more()


def forget_with(forget_more: Callable[[], None]) -> None:
    """Registers a function of a room above, which clears that room's choices, for
    :func:`forget`."""
    _forgotten_with.append(forget_more)


@contextmanager
def retuned(problem: ConvProblem) -> Iterator[None]:
    """Hides earlier choices for ``problem`` within the context, so that it is searched for."""
    choice_log.forget_problem(problem)
    with _lock:
        _retuned.add(problem)
    try:
        yield
    finally:
        with _lock:
            _retuned.discard(problem)
