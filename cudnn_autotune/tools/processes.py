"""Fresh processes that measure, and the messages with them.

Every mode and run has a process of its own, because PyTorch never tunes a known shape again, and
cuDNN loads kernels lazily. Every process has an empty store of compiled kernels
(``CUDA_CACHE_PATH``), too: otherwise the first mode would pay half a second for each kernel of the
others. Starting a process takes seconds, so the next one starts while the current one works; it
touches no GPU before its first message.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import IO, Any, TypeVar

START_LIMIT_S = 180.0
_LEAVE_S = 20.0
_KILL_S = 5.0

Started = TypeVar("Started", bound="Process")


class ProcessFailure(RuntimeError):
    """The error of a worker that died, hung or could not start, and is gone.

    Its earlier answers are valid. A :class:`CaseFailure` leaves the worker there::

        try:
            result = process.ask(request, limit_s=60)
        except CaseFailure as error:
            print(error, "and the next case is asked")
        except ProcessFailure as error:
            print(error, "and another process is started")
    """


class CaseFailure(RuntimeError):
    """The error of a worker that could not do a case, and can continue with the next one."""


class Poisoned(RuntimeError):
    """A failure after which a worker cannot work any more."""


class Process:
    """A worker process; it starts at once.

    Args:
        modules: the first imports of the process; they may register a user's modes.
        command: starts another program with the protocol of :mod:`.worker`.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[str] = (),
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._compiled = tempfile.TemporaryDirectory(
            prefix="cudnn_autotune_", ignore_cleanup_errors=True
        )
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            # -P: modules in the current folder are no part of the installation.
            command or [sys.executable, "-P", "-m", f"{__package__}.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # Its group is killed with all children. Ctrl-C reaches this process alone.
            process_group=0,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "CUDNN_AUTOTUNE_ENABLE": "0",  # A worker is enabled by its task alone.
                "CUDA_CACHE_PATH": self._compiled.name,
                **(environment or {}),
            },
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._errors: collections.deque[str] = collections.deque(maxlen=20)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_answers, args=[self._process.stdout], daemon=True),
            threading.Thread(target=self._errors.extend, args=[self._process.stderr], daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_up(self, request: dict[str, Any]) -> None:
        """Waits until the process is ready, and sends it its first message. Raises ProcessFailure
        if it does not start, or cannot set itself up."""
        self.answer(START_LIMIT_S)
        try:
            self.ask(request, START_LIMIT_S)
        except CaseFailure as error:
            self.close()
            raise ProcessFailure(f"{self.name}: {error}") from error

    def send(self, request: dict[str, Any]) -> None:
        """Sends a message to the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died, and the next read reports the reason
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def ask(self, request: dict[str, Any], limit_s: float) -> Any:
        """Sends a request and returns its result.

        Raises:
            CaseFailure: the request failed.
            ProcessFailure: the worker died, or gave no answer within ``limit_s`` and was killed.
        """
        self.send(request)
        answer = self.answer(limit_s)
        if answer.get("fatal"):
            self.close(_KILL_S)
            raise ProcessFailure(f"{self.name}: {answer['error']}")
        if "error" in answer:
            raise CaseFailure(answer["error"])
        return answer.get("result")

    def close(self, patience_s: float = 0.0) -> None:
        """Ends the process and its children, after ``patience_s`` in which it may end by itself
        with its context."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)
        finally:
            with contextlib.suppress(OSError):  # all of the group have ended
                os.killpg(self._process.pid, signal.SIGKILL)
        # A kernel that hangs keeps its process from dying, so this wait has a limit.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_S)
        if self._process.poll() is not None:
            for reader in self._readers:
                reader.join(timeout=_KILL_S)
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        self._compiled.cleanup()

    def leave(self) -> None:
        """Lets the process end by itself after its last case."""
        self.close(_LEAVE_S)

    def _read_answers(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._answers.put(line)
        self._answers.put(None)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Returns the process's next message. Raises ProcessFailure if it died, or was killed
        without a message within ``limit_s``."""
        try:
            line = self._answers.get(timeout=min(max(0.0, limit_s), threading.TIMEOUT_MAX))
        except queue.Empty:
            self.close()
            raise ProcessFailure(f"{self.name}: no answer within {limit_s:.0f} s") from None
        if line is None:
            self.close(_LEAVE_S)  # Python may take seconds to end
            last = next((line.strip() for line in reversed(self._errors) if line.strip()), "")
            code = self._process.returncode
            raise ProcessFailure(
                f"{self.name}: ended with exit code {code}" + (f": {last}" if last else "")
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def started_ahead(
    names: Iterable[str], start: Callable[[str], Started], ahead: int = 1
) -> Generator[Started, None, None]:
    """Yields processes in turn, each started ``ahead`` turns before it is needed, and closes them
    all. ``start`` makes a name's process."""
    waiting: collections.deque[Started] = collections.deque()
    try:
        for name in names:
            waiting.append(start(name))
            if len(waiting) > ahead:
                yield waiting[0]
                waiting.popleft().close()
        while waiting:
            yield waiting[0]
            waiting.popleft().close()
    finally:
        for process in waiting:
            process.close()
