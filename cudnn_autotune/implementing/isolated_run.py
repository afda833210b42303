"""First runs of each setting of a user's implementation, in a separate process.

There it may hang, end the process, leave the GPU in an error, write to foreign memory, or compute
something else, and harms nobody. A setting that has passed is remembered for this version on this
GPU model (``store.checked_outputs``). Others are left out for the rest of this process.

The separate process leads a process group, which ends as a whole. This process kills it, or a
watcher in the group does once this process is gone.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType
from typing import IO, Any

from cudnn_autotune.engines import registry
from cudnn_autotune.engines.candidate_id import of_implementation, parse
from cudnn_autotune.engines.implementations import ISOLATED
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_to_json
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.implementing.user_implementation import UserImplementation
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.timers.lacking import is_passing

_log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds in which the process must finish its imports and reach the GPU."""
RUN_S = 60.0
"""Seconds in which it must then build and run one setting."""
END_S = 10.0
"""Seconds in which a killed process must end. The driver may hold it longer."""
MOST_HARMFUL = 3
"""Number of harmful settings after which the others of their version are left out untried. Each
takes a process, and up to ``RUN_S``."""
MOST_FAILURES = 3
"""Number of problems for which a raising setting is tried."""
AGAIN_S = 60.0
"""Seconds without a setting for a problem after a failure that may pass, such as short memory."""
_FIRST = 4
"""Number of settings that the mode ``auto`` takes, and one process tries."""
_MOST_AT_ONCE = 16
"""Number of settings that one process tries for a mode that takes more."""
_MOST_BYTES = 1 << 16
"""Size of the longest message."""
_MOST_SAID = 300
_POLL_S = 0.05

# The shell becomes the process; its background part is the watcher. That reads from the channel, to
# which this process never writes: the read ends when this process closes it or is gone.
_WATCHED = '{ { read -r line; kill -KILL 0; } <&3 & } 3<&0; exec "$@" </dev/null'
_CODE = (
    "import json, sys; task = open(int(sys.argv[2]), 'rb'); "
    "sys.path[:] = json.loads(task.readline()); "
    "from cudnn_autotune.implementing.isolated_process import main; main(int(sys.argv[1]), task)"
)
_KEY = "run in a process of its own"
"""The problem's text in ``checked_outputs``."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one setting's run; it has passed if both texts are empty."""

    harm: str = ""
    """Description of its fault."""
    failure: str = ""
    """Reason why it did not run to its end. It may not hold for another problem."""


class UntriedError(Exception):
    """The error, with the reason, of an implementation that no separate process can try."""


class NotImportableError(Exception):
    """The error, with the reason, of functions that a separate process cannot import by name."""


def check(text: str, problem: ConvProblem, device: int | str) -> None:
    """Returns if the candidate has passed in a separate process, now or earlier. Does nothing for
    the implementations of this package. Functions that no other process can import pass, too, with
    a warning in the log.

    Args:
        text: text of an offered candidate for ``problem``.
        device: index of a CUDA device, or ``"cpu"``.

    Raises:
        ImplementationError: it must not run in this process; the message has the reason.
    """
    named = parse(text)
    implementation = registry.get(named)
    if not isinstance(implementation, UserImplementation):
        return
    key = (named.name, named.version, device)
    with _changed:
        version = _versions.setdefault(key, _Version(implementation, device))
    why = version.why_left_out(named.settings, problem)
    if why:
        raise ImplementationError(f"{text} is left out: {why}")


def forget(name: str) -> None:
    """Forgets this process's knowledge of an implementation. Does not wait for a run of it."""
    with _changed:
        for key in [key for key in _versions if key[0] == name]:
            del _versions[key]


class _Version:
    """This process's knowledge of a version of an implementation on a device."""

    def __init__(self, implementation: UserImplementation, device: int | str) -> None:
        self._implementation = implementation
        self._device = device
        self.running: set[str] = set()
        """Settings that a thread of this process is trying."""
        self._tried: dict[str, str] = {}
        """Setting -> the reason why it is left out; empty if it has passed."""
        self._failures: dict[str, dict[ConvProblem, str]] = {}
        """Setting -> problem -> the reason of a failure."""
        self._passing: dict[tuple[str, ConvProblem], tuple[str, float]] = {}
        """Setting and problem -> the reason of a passing failure, and the time of the next try."""
        self._untried: str | None = None
        """The reason why untried settings are left out, else empty; None: they must be tried."""
        self._harmful = 0
        """Number of settings that did harm."""

    def why_left_out(self, settings: str, problem: ConvProblem) -> str:
        """Returns the reason why the settings must not run for the problem, or an empty text. Tries
        unknown ones, or waits for the thread that does."""
        while True:
            with _changed:
                _changed.wait_for(lambda: settings not in self.running)
                known = self._known(settings, problem)
            if known is not None:
                return known
            self._try(self._tried_with(settings, problem), problem)

    def _known(self, settings: str, problem: ConvProblem) -> str | None:
        if settings in self._tried:
            return self._tried[settings]
        if self._untried is not None:
            return self._untried
        why, until_s = self._passing.get((settings, problem), ("", 0.0))
        if time.monotonic() < until_s:
            return why
        failures = self._failures.get(settings, {})
        if problem in failures:
            return failures[problem]
        if len(failures) >= MOST_FAILURES:
            return f"{list(failures.values())[-1]}, as for {len(failures) - 1} problems before"
        return None

    def _tried_with(self, settings: str, problem: ConvProblem) -> list[str]:
        """Returns these settings and those that a process tries with them. A search probably needs
        these next, and starting a process takes seconds."""
        try:
            offered = self._implementation.settings_for(problem)
        except Exception:  # a user's function
            offered = ()
        if settings not in offered[:_FIRST]:
            return [settings, *(one for one in offered if one != settings)]
        return [settings, *(one for one in offered[:_FIRST] if one != settings)]

    def _try(self, some: Sequence[str], problem: ConvProblem) -> None:
        global _is_busy
        passed = [settings for settings in some if self._has_passed_before(settings)]
        with _changed:
            self._tried.update(dict.fromkeys(passed, ""))
            unknown = (s for s in some if s not in self.running and self._known(s, problem) is None)
            claimed = list(dict.fromkeys(unknown))[:_MOST_AT_ONCE]
            self.running.update(claimed)
        if not claimed:
            return
        try:
            # One process at a time, since each takes some memory of the GPU.
            with _changed:
                _changed.wait_for(lambda: not _is_busy)
                _is_busy = True
            try:
                self._run(claimed, problem)
            finally:
                with _changed:
                    _is_busy = False
        finally:
            with _changed:
                self.running.difference_update(claimed)
                _changed.notify_all()

    def _run(self, some: Sequence[str], problem: ConvProblem) -> None:
        name = f"{self._implementation.name}@{self._implementation.version}"
        _log.info("%s runs in a process of its own first, which takes some seconds", name)
        left = list(some)
        try:
            while left and self._untried is None and self._harmful < MOST_HARMFUL:
                some = tuple(left)
                for outcome in run_elsewhere(self._implementation, some, problem, self._device):
                    self._record(left.pop(0), problem, outcome)
        except NotImportableError as error:
            self._untried = ""
            _log.warning(
                "could not test %s in a separate process (%s); a hang or crash will affect this "
                "one",
                *(name, error),
            )
        except UntriedError as error:
            why = f"it could not be tested in a separate process ({error})"
            if is_passing(str(error)):
                for settings in left:
                    self._leave_out_for_now(settings, problem, why)
                return
            self._untried = why
            _log.warning("%s does not compete: %s", name, why)
        if left and self._untried is None:
            self._untried = f"{self._harmful} other settings of {name} do harm"
            _log.warning("%s: what has not been tried is left out: %s", name, self._untried)

    def _record(self, settings: str, problem: ConvProblem, outcome: Outcome) -> None:
        text = self._text(settings)
        why = f"in a process of its own {outcome.failure}"
        if outcome.harm:
            _log.warning("%s is left out: %s", text, outcome.harm)
            self._harmful += 1
            self._tried[settings] = outcome.harm
        elif is_passing(outcome.failure):
            self._leave_out_for_now(settings, problem, why)
        elif outcome.failure:
            if settings not in self._failures:
                _log.warning("%s is left out, first for %s: %s", text, problem.text, why)
            self._failures.setdefault(settings, {})[problem] = why
        else:
            self._tried[settings] = ""
            if isinstance(self._device, int):
                checked_outputs.remember(_KEY, text, self._device, 0.0)

    def _leave_out_for_now(self, settings: str, problem: ConvProblem, why: str) -> None:
        text = self._text(settings)
        _log.info("%s is left out for some time, for %s: %s", text, problem.text, why)
        now_s = time.monotonic()
        kept = {key: one for key, one in self._passing.items() if one[1] > now_s}
        self._passing = {**kept, (settings, problem): (why, now_s + AGAIN_S)}

    def _has_passed_before(self, settings: str) -> bool:
        if not isinstance(self._device, int):
            return False
        return checked_outputs.error_of(_KEY, self._text(settings), self._device) is not None

    def _text(self, settings: str) -> str:
        one = self._implementation
        return of_implementation(one.name, one.version, settings).text


def run_elsewhere(
    implementation: UserImplementation,
    settings: Sequence[str],
    problem: ConvProblem,
    device: int | str,
) -> Iterator[Outcome]:
    """Runs settings of an implementation on random data in a new process, and yields the outcome of
    each, in their order. It stops behind the first harmful one, which may spoil later results of
    the process.

    Raises:
        NotImportableError, UntriedError: none of the settings was tried.
    """
    # The process does not call the other functions, which may have no name.
    runs = replace(implementation, supports=callable, settings=())
    try:
        task = _pickled((runs, tuple(settings), problem_to_json(problem), device))
    except Exception as error:  # any kind, as objects may define their own pickling
        raise NotImportableError(f"it cannot be imported by name ({error})") from None
    with _separate_process(task) as child:
        begun = child.message(START_S, "the other process")
        if "not importable" in begun:
            raise NotImportableError(str(begun["not importable"]))
        if "untried" in begun or "harm" in begun:
            raise UntriedError(str(begun.get("untried") or begun["harm"]))
        for _ in settings:
            done = child.message(RUN_S, "in a process of its own it")
            outcome = Outcome(str(done.get("harm", "")), str(done.get("failure", "")))
            yield outcome
            if outcome.harm:
                return


class _ByName(pickle.Pickler):
    """A pickler of functions and classes by name, without importing their modules. The import of a
    module may be waiting for this thread: its code runs a convolution, for which a thread of the
    search needs the module's functions."""

    def reducer_override(self, obj: Any) -> Any:
        is_named = isinstance(obj, (FunctionType, type)) and obj is not imported
        if not is_named or obj.__module__ == "builtins":
            return NotImplemented
        module, name = obj.__module__, obj.__qualname__
        found: object = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not obj:
            raise pickle.PicklingError(f"{name} is not what module {module} has under this name")
        return imported, (module, name)


def imported(module: str, qualname: str) -> Any:
    """Returns a function or class by its name, in the process that reads the pickle."""
    return attrgetter(qualname)(importlib.import_module(module))


def _pickled(task: object) -> bytes:
    file = io.BytesIO()
    _ByName(file).dump(task)
    return file.getvalue()


@contextmanager
def _separate_process(task: bytes) -> Iterator[_SeparateProcess]:
    """Starts a process for the task, and ends it with all that it has started.

    Raises:
        UntriedError: it cannot be started.
    """
    if (why := _why_not_startable()) is not None:
        raise UntriedError(why)
    with ExitStack() as stack:
        try:
            given, said = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            # Python itself ignores entries that are no text.
            paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
            given.write(json.dumps(paths).encode() + b"\n" + task)
            given.seek(0)
            # In a socket of this kind messages have bounds, so none can be torn.
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(here)
            _channels.add(here)
            stack.callback(_channels.discard, here)
            files = (there.fileno(), given.fileno())
            program = [sys.executable, "-P", "-c", _CODE, *map(str, files)]
            with there:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _WATCHED, "sh", *program],
                    stdin=there.fileno(),
                    stdout=said,
                    stderr=said,
                    pass_fds=files,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "CUDNN_AUTOTUNE_CACHE": "off",
                        "CUDNN_AUTOTUNE_ENABLE": "0",
                        ISOLATED: "1",
                    },
                )
        except (OSError, ValueError) as error:
            raise UntriedError(f"no process can be started: {error}") from None
        child = _SeparateProcess(process, here, said)
        stack.callback(child.end)
        yield child


def _why_not_startable() -> str | None:
    if ISOLATED in os.environ:
        return "this process tries an implementation itself"
    if getattr(sys, "frozen", False):
        return "sys.executable starts this application and not Python"
    if not isinstance(sys.executable, str) or not sys.executable:
        return f"sys.executable must be the path of Python's program, and is {sys.executable!r}"
    return None


class _SeparateProcess:
    """A process that tries settings, and its answers: messages of one JSON object each."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, said: IO[bytes]
    ) -> None:
        self._process = process
        self._channel = channel
        self._said = said

    def message(self, seconds: float, who: str) -> dict[str, Any]:
        """Returns the next message; if there is none in these seconds, a message with the process's
        ``harm``, as a sentence about ``who``."""
        deadline = time.monotonic() + seconds
        while True:
            end = self._end()  # read before the channel, which may hold a message from before
            with suppress(TimeoutError, ConnectionError):
                self._channel.settimeout(_POLL_S)
                data = self._channel.recv(_MOST_BYTES + 1)
                if data:
                    found = _parsed(data)
                    return {"harm": f"{who} sends no valid answer"} if found is None else found
                time.sleep(_POLL_S)  # the channel is closed
            if end:
                return {"harm": f"{who} {end}{self._last_said()}"}
            if time.monotonic() > deadline:
                return {"harm": f"{who} does not finish within {seconds:g} s"}

    def end(self) -> None:
        """Kills the process and its group, and waits for its end, but not for ever."""
        with suppress(OSError):
            # Nothing else has its number, as it is not reaped yet, and the watcher is in its group.
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # the watcher kills the rest
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            _log.warning(
                "process %d, in which an implementation was tried, has been killed and does not "
                "end within %g s; it may still use the GPU",
                *(self._process.pid, END_S),
            )

    def _end(self) -> str:
        """Returns the way in which the process has ended, or an empty text. It is not reaped."""
        try:
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code in this program has waited for it
            return "has ended"
        if info is None:
            return ""
        is_exit = info.si_code == os.CLD_EXITED
        return (
            f"ends with status {info.si_status}" if is_exit else f"dies of signal {info.si_status}"
        )

    def _last_said(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _MOST_SAID))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""


def _parsed(data: bytes) -> dict[str, Any] | None:
    """Returns the object of a message, None if it holds none or is longer than allowed."""
    try:
        found = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_changed = threading.Condition()
"""The guard of the variables below and of all versions' fields; never held during a run."""
_versions: dict[tuple[str, str, int | str], _Version] = {}
"""By name, version and device."""
_is_busy = False
"""True while a process is trying settings."""
_channels: set[socket.socket] = set()


def _after_fork() -> None:
    """Leaves the runs of the parent process to it."""
    global _changed, _is_busy
    _changed = threading.Condition()
    _is_busy = False
    for version in _versions.values():
        version.running.clear()
    for channel in _channels:  # while open here, it keeps the watcher from acting
        channel.close()
    _channels.clear()


os.register_at_fork(after_in_child=_after_fork)
