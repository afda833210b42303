"""Looks up known choices before a search, and commits new ones after it.

:func:`find` asks the pins, then what ranks have agreed on, then the store. :func:`commit` is the
only writer of new choices: it records them in the log, stores them and announces them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store import Decision, Policy, checked_outputs
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import key_of, was_cut_short
from cudnn_autotune.tuning import choice_log, deferred, events, prefetching, settings
from cudnn_autotune.tuning.checking import is_right
from cudnn_autotune.tuning.choice import Choice, untimed
from cudnn_autotune.tuning.pins import pinned

_log = logging.getLogger(__name__)
_lock = ForkSafeLock()
_agreed: dict[tuple[int, str], Decision] = {}
_retuned: set[ConvProblem] = set()
_forgotten_with: list[Callable[[], None]] = []


def find(problem: ConvProblem, policy: Policy, device: int) -> Choice | None:
    """Returns the known choice for ``problem`` under a policy; None where a search must decide.

    Calls of a probe find pins only.
    """
    if (text := pinned(problem)) is not None:
        decision = untimed(problem, policy, Measurement(named(text), None, 0))
        return Choice(decision, device, "pinned")
    with _lock:
        if policy.probe is not None or problem in _retuned:
            return None
        agreed = _agreed.get((device, key_of(problem, policy)))
    origin = "agreed"
    found = agreed and agreed.restricted_to(problem.deterministic, policy.workspace)
    if found is None and store_settings.is_read():
        origin = "store"
        try:
            found = store_settings.layers(device).find(problem, policy, _suffices)
        except Exception:  # a store may hold anything: a call is served
            _log.exception("%s: what the store has of it cannot be read", problem.text)
    return None if found is None else Choice(found, device, origin)


def _suffices(decision: Decision) -> bool:
    """Returns whether a stored decision may serve. Some other program may have stored what is
    provisional."""
    is_final = not decision.selection.evidence.provisional
    return is_final and not was_cut_short(decision, settings.get_budget_ms())


def reject(known: Choice, *, varies: bool = False) -> None:
    """Removes a known choice that cannot serve on its device, so that :func:`find` does not prefer
    it to the choice that will be tuned instead. A pin stays.

    Args:
        varies: whether its only fault is that it differs from run to run.
    """
    if known.origin == "pinned":
        return
    if known.origin == "agreed":
        with _lock:
            _agreed.pop((known.device, known.decision.key), None)
    if store_settings.is_read() or store_settings.is_written():
        layers = store_settings.layers(known.device)
        deferred.change(partial(layers.reject, known.decision, varies=varies))


def similar(problem: ConvProblem, device: int) -> list[Candidate]:
    """Returns the candidates chosen for the problems most like ``problem``, nearest problem
    first."""
    found: dict[str, Candidate] = {}
    for decision in nearest(problem, device):
        if decision.chosen is not None:
            found.setdefault(decision.chosen.candidate.text, decision.chosen.candidate)
    return list(found.values())


def nearest(problem: ConvProblem, device: int, most: int = 3) -> list[Decision]:
    """Returns up to ``most`` stored decisions for the problems most like ``problem``, the nearest
    first."""
    if not store_settings.is_read():
        return []
    try:
        layers = store_settings.layers(device)
        found = [layers.by_key(key) for key in layers.nearest(problem, most)]
    except Exception:  # a store may hold anything: a call is served
        _log.exception("%s: similar problems in the store cannot be read", problem.text)
        return []
    return [decision for decision in found if decision is not None]


def commit(choice: Choice, since: int | None = None) -> None:
    """Records a choice, stores it if it was measured here and is final, and announces it. Records
    which outputs were right and wrong, too. Does nothing if its problem was forgotten since.

    Args:
        since: the problem's ``choice_log.generation`` when the choice was begun; None stands for
            the current one.
    """
    if not choice_log.record(choice, since):
        return
    problem, error = choice.problem, choice.relative_error
    # It is announced before what may wait for the lock of a file.
    changes = [partial(events.announce, choice)]
    # A new size seldom comes again, so neither its choice nor the check of it is kept.
    if choice.origin != "neighbour" and error is not None and is_right(problem, error):
        right = (problem.text, choice.text, choice.device, error)
        changes.append(partial(checked_outputs.remember, *right))
    for text, _ in choice.rejected:
        changes.append(partial(checked_outputs.withdraw, problem.text, text, choice.device))
    if choice.origin == "tuned":
        changes.append(partial(_store, [choice.decision], choice.device))
    deferred.change(*changes)


def install(decisions: Iterable[Decision], device: int) -> None:
    """Makes decisions that ranks have agreed on serve their problems on ``device`` from now on, and
    stores those that are final. A provisional one serves this process to its end, since ranks that
    tuned it again would choose differently."""
    decisions = list(decisions)
    with _lock:
        for decision in decisions:
            _agreed[device, decision.key] = decision
    for decision in decisions:
        choice_log.forget_problem(decision.problem)
        choice_log.record(Choice(decision, device, "agreed"))
    _store(decisions, device)


def _store(decisions: Iterable[Decision], device: int) -> None:
    """Stores those of the decisions that were measured and are final."""
    measured = [
        decision
        for decision in decisions
        if decision.selection.total_samples > 0 and not decision.selection.evidence.provisional
    ]
    if not measured or not store_settings.is_written():
        return
    try:
        store_settings.layers(device).add(measured, are_latest=True)
    except ValueError as error:  # evidence of a user's own strategy that no store can hold
        texts = ", ".join(decision.problem.text for decision in measured)
        _log.warning("%s: the decision is not kept: %s", texts, error)


def forget() -> None:
    """Clears all choices, built plans and counts, and what ranks have agreed upon: the next call of
    each shape looks them up again. Pins and stores are not touched."""
    with _lock:
        _agreed.clear()
    prefetching.clear()
    choice_log.forget()
    for forget_more in _forgotten_with:
        forget_more()


def forget_with(forget_more: Callable[[], None]) -> None:
    """Lets :func:`forget` call a function of a room above, which clears its own choices."""
    _forgotten_with.append(forget_more)


@contextmanager
def retuned(problem: ConvProblem) -> Iterator[None]:
    """Within the context no earlier choice for ``problem`` is found, so that it is searched for."""
    choice_log.forget_problem(problem)
    with _lock:
        _retuned.add(problem)
    try:
        yield
    finally:
        with _lock:
            _retuned.discard(problem)
