"""The GPU is one process's at a time; while a model is compiled, which needs the CPU only, another
process has it. Of those that wait, the one of the earliest case is next."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from cudnn_autotune.nn.models import programs
from cudnn_autotune.nn.models.compiling_ahead import CompilingAhead
from cudnn_autotune.timers.gpu_timer import GpuTimer

# Of Dynamo's callbacks: what is not among them may be timed on the GPU.
_COMPILING = ("DYNAMO", "LAZY_BACKWARD")


class GpuLock:
    """A lock of a file, which ends with its process at the latest.

    Args:
        place: of this process's case among all. A process that waits locks the byte of its place.
    """

    def __init__(self, path: str, place: int = 0) -> None:
        self._file, self._is_lent = os.open(path, os.O_CREAT | os.O_RDWR), False
        self._place = place + 1  # no byte is before that of 0
        self.waited_s = 0.0
        """How long this process has waited for it so far."""

    def acquire(self) -> None:
        begin = time.perf_counter()
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._place)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        while self._is_awaited_before():
            fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(0.005)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)
        self.waited_s += time.perf_counter() - begin

    def _is_awaited_before(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, self._place)
            fcntl.lockf(self._file, fcntl.LOCK_UN, self._place)
            return False
        return True

    def release(self) -> None:
        """Gives back the GPU, when it has nothing left to do, and the memory that is not in use."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Releases the lock, which is held, and acquires it again at the end."""
        self.release()
        try:
            yield
        finally:
            self.acquire()

    @contextlib.contextmanager
    def lent_while_compiling(self) -> Iterator[None]:
        """Releases the lock, which is held, while Dynamo compiles."""
        from torch._dynamo.callback import callback_handler

        def begin(args: Any) -> None:
            if args.callback_trigger.name in _COMPILING:
                self._is_lent = True
                gc.collect()
                self.release()

        def end(args: Any) -> None:
            if args.callback_trigger.name in _COMPILING:
                self.acquire()
                self._is_lent = False

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)

    def take_back_for_groups(self) -> None:
        """From now on, this process has the GPU while our backend times the groups of a graph."""
        judged = programs.fuse_judged

        def run(*args: Any, **more: Any) -> Any:
            if not self._is_lent:
                return judged(*args, **more)
            self.acquire()
            try:
                return judged(*args, **more)
            finally:
                self.release()

        programs.fuse_judged = run

    def lend_while_building(self) -> None:
        """From now on, another process has the GPU while engines are compiled for searches."""
        built = GpuTimer._built

        def run(timer: GpuTimer, candidates: Any) -> Any:
            if all(not c.is_compiled or c.text in timer.plans for c in candidates):
                return built(timer, candidates)
            with self.lent():
                return built(timer, candidates)

        GpuTimer._built = run  # type: ignore[method-assign]
        wait = CompilingAhead.wait

        def wait_for(ahead: CompilingAhead, *args: Any) -> None:
            with self.lent():
                wait(ahead, *args)

        CompilingAhead.wait = wait_for  # type: ignore[method-assign]

    def lent_while_exporting(self) -> contextlib.AbstractContextManager[Any]:
        """Releases the lock, which is held, while ``torch.export`` traces a model."""
        return mock.patch.object(torch.export, "export", self.lent()(torch.export.export))
