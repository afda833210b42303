"""Plans of known choices, made before a call needs them, on threads of low priority.

A store lists decisions in the order of their measurement, so decisions of one model lie together.
When a decision serves, the compiled plans of the decisions around it are read back in the
background (:func:`read_ahead`), without a compilation. A plan has no effect until a call takes it,
and then it is verified like any other.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from cudnn_autotune.core.background import COMPILING, BackgroundThreads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Layered
from cudnn_autotune.store.kept_plans import GpuKey
from cudnn_autotune.tuning import made_ahead, settings
from cudnn_autotune.tuning.choice import Choice

_log = logging.getLogger(__name__)
_READING = BackgroundThreads(4)
_BLOCK = 64
# The most plans that wait, each of some 0.2 MB or more. Older ones are dropped.
_MOST_WAITING = 256

PlanFuture = Future["_C.Plan | None"]
_Key = tuple[GpuKey, bytes, str]

_waiting: OrderedDict[_Key, PlanFuture] = OrderedDict()
_readers: dict[int, Reader] = {}


def read_ahead(known: Choice) -> None:
    """Begins to read back the compiled plans of the decisions around ``known``, which comes from
    the store. Does nothing if that has begun already, or is switched off. It does not raise, even
    if an entry cannot be read."""
    if known.origin != "store" or not settings.is_prefetching():
        return
    try:
        _read_around(known)
    except Exception:
        _log.exception("%s: what the store has around it is not read ahead", known.problem.text)


def _read_around(known: Choice) -> None:
    layers = store_settings.layers(known.device)
    with LOCK:
        reader = _readers.get(known.device)
        if reader is None or reader.layers is not layers:
            reader = _readers[known.device] = Reader(layers)
        around = reader.around(known.decision)
    chosen = [(d.problem, d.chosen.candidate.text) for d in around if d.chosen]
    # An implementation's kernels are kept, and not its plans.
    start([(problem, text) for problem, text in chosen if identify(text).is_engine], known.device)


def start(
    wanted: Iterable[tuple[ConvProblem, str]], gpu: GpuKey, *, may_compile: bool = False
) -> list[PlanFuture]:
    """Begins to make plans of engine configs, given by their texts, that are not waiting yet.

    Args:
        may_compile: whether a plan that is not kept is compiled; else it is left out.

    Returns:
        For each begun one, the future of the plan, or of None if the plan is left out.
    """
    keys = {(gpu, _C.problem_key(p.native()), text): (p.native(), text) for p, text in wanted}
    with LOCK:
        if may_compile:
            for key in keys.keys() & _waiting.keys():
                if _is_without_plan(_waiting[key]):
                    del _waiting[key]
        begun: dict[_Key, PlanFuture] = {}
        threads = COMPILING if may_compile else _READING
        # RuntimeError: the system gives no thread, or the process exits. Then calls build plans.
        with suppress(RuntimeError):
            for key, (native, text) in keys.items():
                if key not in _waiting:
                    begun[key] = threads.submit(build_ahead, native, gpu, text, may_compile)
        _waiting.update(begun)
        while len(_waiting) > _MOST_WAITING:
            _waiting.popitem(last=False)[1].cancel()
    return list(begun.values())


def build_ahead(
    native: _C.ConvProblem, gpu: GpuKey, text: str, may_compile: bool
) -> _C.Plan | None:
    """Builds a plan for another thread, which may be capturing a CUDA graph.

    Args:
        may_compile: whether an engine may be compiled; else the result is its kept plan, or None.

    Raises:
        PlanError: it does not build.
    """
    if isinstance(gpu, int):
        search = _C.EngineList.on_device(native, gpu)
    else:
        search = _C.EngineList.by_properties(native, gpu)
    return search.build(text) if may_compile else search.read_back(text)


def _is_without_plan(built: PlanFuture) -> bool:
    """Returns whether a plan has not begun, or was not kept. Cancels one that has not begun."""
    if built.cancel():
        return True
    return built.done() and not built.exception() and built.result() is None


def take(native: _C.ConvProblem, engine_text: str, gpu: GpuKey) -> _C.Plan | None:
    """Hands over the plan that was made for a config, or None. Waits for it if it is being made."""
    with LOCK:
        built = _waiting.pop((gpu, _C.problem_key(native), engine_text), None)
    if built is None or built.cancel():  # its turn has not come: the caller is faster
        return None
    with suppress(Exception):  # the caller builds it itself, and meets the error
        return built.result()
    return None


def clear() -> None:
    """Drops all waiting plans, and cancels the others."""
    with LOCK:
        for built in _waiting.values():
            built.cancel()
        _waiting.clear()
        _readers.clear()


class Reader:
    """A record of the decisions of a store that have been read ahead."""

    def __init__(self, layers: Layered) -> None:
        self.layers = layers
        self._keys = list(layers.keys())
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._begun: set[int] = set()

    def around(self, served: Decision) -> list[Decision]:
        """Returns the decisions near ``served`` that have a compiled plan, under its limits.

        They are the decisions of its block of keys, and from that block's second half on, of the
        next block. A block is returned only once.
        """
        place = self._places.get(served.key)
        if place is None:
            return []
        blocks = {place // _BLOCK, (place + _BLOCK // 2) // _BLOCK} - self._begun
        self._begun |= blocks
        keys = [key for b in sorted(blocks) for key in self._keys[b * _BLOCK : (b + 1) * _BLOCK]]
        found = (self.layers.by_key(key) for key in keys if key != served.key)
        same_mode = (
            d.restricted_to(served.problem.deterministic, served.workspace_limit)
            for d in found
            if d is not None
            and replace(d.policy, workspace=served.policy.workspace) == served.policy
        )
        return [d for d in same_mode if d and d.candidate.is_compiled]


def _after_fork() -> None:
    """Drops the plans in a child process, which lacks the threads that would make them."""
    _waiting.clear()
    _readers.clear()


os.register_at_fork(after_in_child=_after_fork)
made_ahead.register(take, clear)
