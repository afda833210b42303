"""Decisions and verdicts in ``torch.compiler.save_cache_artifacts``. Each entry of the store is an
artifact: a store's file with one line."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch.compiler._cache import CacheArtifactManager

from cudnn_autotune.store import codec, file_format, settings, verdicts
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.notices import WarningsPutOff, warn_once
from cudnn_autotune.tuning import choice_log, events
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.stored import is_kept
from cudnn_autotune_autoload import ARTIFACT

_log = logging.getLogger(__name__)
_DECISION, _VERDICT = "decision ", "verdict "


@functools.cache
def begin() -> None:
    """Records the decisions of this process, earlier ones too, and the verdicts that it finds or
    measures from now on."""
    events.on_decision(_record_choice)
    verdicts.on_entry(_record_verdict)
    for choice in choice_log.choices():
        _record_choice(choice)


def _record_choice(choice: Choice) -> None:
    if not is_kept(choice.decision):
        return
    environment = settings.layers(choice.device).user.environment
    try:
        line = codec.encode(choice.decision, environment)
    except ValueError as error:  # evidence of a user's own strategy that no store can hold
        _log.info("%s: the decision is no cache artifact: %s", choice.problem.text, error)
        return
    _record(_DECISION + choice.decision.key, line, environment)


def _record_verdict(device: int | None, name: str, tree: Any) -> None:
    environment = settings.layers(device).user.environment
    _record(_VERDICT + name, verdicts.line_of(name, tree, environment), environment)


def _record(key: str, line: bytes, environment: Environment) -> None:
    content = file_format.encode(environment, [line])
    CacheArtifactManager.record_artifact(ARTIFACT, key, content)


def load(key: str, content: bytes) -> None:
    """Puts an artifact into the user's store, into the file of the artifact's environment. A later
    decision stays. What cannot be read causes one warning in a process."""
    if settings.is_locked() or not settings.is_read():
        _log.info("%s: the store's mode leaves cache artifacts alone", key)
        return
    found = file_format.decode(content)
    with WarningsPutOff():
        if found.why or found.environment is None:
            _warn(f"{key}: {found.why}")
        if found.environment is None:
            return
        store = settings.user_store(found.environment)
        if key.startswith(_VERDICT):
            verdicts.VerdictFile(store, not settings.is_written()).add(found.entries)
            return
        try:
            store.add(codec.decode(line, found.environment) for line in found.entries.values())
        except ValueError as error:
            _warn(f"{key}: {error}")


def _warn(why: str) -> None:
    warn_once((ARTIFACT, "artifact"), f"a cache artifact is not taken over: {why}")
