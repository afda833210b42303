"""The user's store as a source of choices: lookups, additions and rejections.

It is imported at a store's first read or write (``remembering``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision, was_cut_short
from cudnn_autotune.tuning import deferred, settings
from cudnn_autotune.tuning.checking import is_right
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.prefetching import read_ahead as read_ahead

_log = logging.getLogger(__name__)


def find(problem: ConvProblem, policy: Policy, device: int) -> Decision | None:
    """Returns the stored decision that may serve ``problem`` under a policy."""
    if not store_settings.is_read():
        return None
    try:
        return store_settings.layers(device).find(problem, policy, _suffices)
    except Exception:  # a store may have any content: a call is served
        _log.exception("%s: what the store has of it cannot be read", problem.text)
        return None


def _suffices(decision: Decision) -> bool:
    """Returns whether a stored decision, maybe another program's provisional one, may serve."""
    is_final = not decision.selection.evidence.provisional
    return is_final and not was_cut_short(decision, settings.get_budget_ms())


def reject(known: Choice, *, varies: bool) -> None:
    """Removes a decision that cannot serve on its device; arguments as of
    ``remembering.reject``."""
    layers = store_settings.layers(known.device)
    deferred.change(partial(layers.reject, known.decision, varies=varies))


def nearest(problem: ConvProblem, device: int, most: int) -> list[Decision]:
    """Returns up to ``most`` stored decisions for the nearest problems, in this order."""
    if not store_settings.is_read():
        return []
    try:
        layers = store_settings.layers(device)
        found = [layers.by_key(key) for key in layers.nearest(problem, most)]
    except Exception:  # a store may have any content: a call is served
        _log.exception("%s: similar problems in the store cannot be read", problem.text)
        return []
    return [decision for decision in found if decision is not None]


def add(decisions: Iterable[Decision], device: int) -> None:
    """Stores the decisions that were measured and are final."""
    measured = [decision for decision in decisions if is_kept(decision)]
    if not measured or not store_settings.is_written():
        return
    try:
        store_settings.layers(device).add(measured, are_latest=True)
    except ValueError as error:  # evidence of a user's own strategy that no store can hold
        texts = ", ".join(decision.problem.text for decision in measured)
        _log.warning("%s: the decision is not kept: %s", texts, error)


def is_kept(decision: Decision) -> bool:
    """Returns whether a decision was measured and is final."""
    return decision.selection.total_samples > 0 and not decision.selection.evidence.provisional


def add_checks(choice: Choice) -> None:
    """Records the right and wrong outputs of a choice, when :func:`deferred.change` allows. The
    check of a new size is not kept, since that seldom comes again."""
    text, device, error = choice.problem.text, choice.device, choice.relative_error
    if choice.origin != "neighbour" and error is not None and is_right(choice.problem, error):
        deferred.change(partial(checked_outputs.remember, text, choice.text, device, error))
    for wrong, _ in choice.rejected:
        deferred.change(partial(checked_outputs.withdraw, text, wrong, device))


def checked_error(choice: Choice) -> float | None:
    """Returns the relative error of the choice's output if a process of this user has found it
    right; else None."""
    error = checked_outputs.error_of(choice.problem.text, choice.text, choice.device)
    return error if is_right(choice.problem, error) else None
