"""Runs a user's implementation in a process of its own, once, before it runs in this one.

There it may hang, end the process, leave the GPU in an error, write to memory that is not its own,
or compute something else, and harms nobody. What has passed is remembered for this version on this
GPU model (``store.checked_outputs``). What has not is left out for the rest of this process.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from cudnn_autotune.engines import registry
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_to_json
from cudnn_autotune.engines.registry import ImplementationError, Named
from cudnn_autotune.engines.user_implementation import UserImplementation
from cudnn_autotune.store import checked_outputs

_log = logging.getLogger(__name__)

START_S = 120.0
"""How long the process may take to import what it needs and to reach the GPU."""
RUN_S = 60.0
"""How long it may then take to build and run the candidate."""
_MOST_SAID = 300
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cudnn_autotune.tuning.isolated_process import main; main()"
)
_KEY = "run in a process of its own"
"""Stands for the problem in ``checked_outputs``."""

_lock = threading.Lock()
_found: dict[tuple[str, str, int | str], str] = {}
"""Why each version is left out on a device; empty if it is not."""


@dataclass(frozen=True)
class Outcome:
    """What has come of a run. One of the two may be given; else it has passed."""

    harm: str = ""
    """What it does wrong."""
    impossible: str = ""
    """Why it could not be run to its end in another process."""


def check(text: str, problem: ConvProblem, device: int | str) -> None:
    """Has the candidate's version been run elsewhere, unless that has happened before. Does nothing
    for the implementations of this package.

    Args:
        text: of a candidate that is offered for ``problem``.
        device: the index of a CUDA device, or ``"cpu"``.

    Raises:
        ImplementationError: it does harm; the message says which.
    """
    named = registry.parse(text)
    implementation = registry.get(named)
    if not isinstance(implementation, UserImplementation):
        return
    key = (named.name, named.version, device)
    with _lock:  # several settings are built side by side, and one run speaks for all
        if key not in _found:
            _found[key] = _harm_of(implementation, named, problem, device)
        if _found[key]:
            raise ImplementationError(f"{text} is left out: {_found[key]}")


def forget(name: str) -> None:
    """Forgets what has come of an implementation in this process."""
    with _lock:
        for key in [key for key in _found if key[0] == name]:
            del _found[key]


def _harm_of(
    implementation: UserImplementation, named: Named, problem: ConvProblem, device: int | str
) -> str:
    version = f"{named.name}@{named.version}"
    if isinstance(device, int) and checked_outputs.error_of(_KEY, version, device) is not None:
        return ""
    _log.info("%s runs in a process of its own first, which takes some seconds", version)
    outcome = run_elsewhere(implementation, named.settings, problem, device)
    if outcome.impossible:
        _log.warning(
            "%s runs in this process without having been tried in another one, where it could "
            "hang or crash without harm: %s",
            *(version, outcome.impossible),
        )
    elif outcome.harm:
        _log.warning("%s is left out: %s", named.text, outcome.harm)
    elif isinstance(device, int):
        checked_outputs.remember(_KEY, version, device, 0.0)
    return outcome.harm


def run_elsewhere(
    implementation: UserImplementation, settings: str, problem: ConvProblem, device: int | str
) -> Outcome:
    """Runs an implementation on random data in a new process."""
    # The other functions, which may have no name, are not asked there.
    runs = replace(implementation, supports=callable, settings=())
    try:
        task = pickle.dumps((runs, settings, problem_to_json(problem), device))
    except Exception as error:  # of any kind, as objects may say themselves how they are pickled
        return Outcome(impossible=f"it cannot be imported by name ({error})")
    try:
        return _in_child(task)
    except OSError as error:
        return Outcome(impossible=f"no process can be started ({error})")


def _in_child(task: bytes) -> Outcome:
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "CUDNN_AUTOTUNE_CACHE": "off"},
        )
        try:
            return _Conversation(child, said).outcome(task)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


class _Conversation:
    """What a child process is told, and what it answers: lines of JSON."""

    def __init__(self, child: subprocess.Popen[bytes], said: Any) -> None:
        self._child = child
        self._said = said
        self._unread = b""

    def outcome(self, task: bytes) -> Outcome:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(task)
            self._child.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which is found below
        ready = self._answer(START_S)
        if ready is None:
            return Outcome(impossible=f"the other process {self._end(START_S)}")
        if "impossible" in ready:
            return Outcome(impossible=str(ready["impossible"]))
        done = self._answer(RUN_S)
        if done is None:
            return Outcome(harm=f"in a process of its own it {self._end(RUN_S)}")
        return Outcome(str(done.get("harm", "")), str(done.get("impossible", "")))

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process ends or the time is over before."""
        pipe = self._child.stdout
        assert pipe is not None
        deadline = time.monotonic() + seconds
        with DefaultSelector() as selector:
            selector.register(pipe, EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                more = os.read(pipe.fileno(), 4096)
                if not more:
                    return None
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self, seconds: float) -> str:
        """How the process ended, with the last of what it said."""
        try:
            status = self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"does not finish within {seconds:g} s"
        how = f"ends with status {status}" if status >= 0 else f"dies of signal {-status}"
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _MOST_SAID))
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return f"{how} ({said[-1]})" if said else how
