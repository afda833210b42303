"""The GPU is one process's at a time; while a model is compiled, which needs the CPU only, another
process has it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from cudnn_autotune.compile import programs
from cudnn_autotune.timers.gpu_timer import GpuTimer

# Of Dynamo's callbacks: what is not among them may be timed on the GPU.
_COMPILING = ("DYNAMO", "LAZY_BACKWARD")


class GpuLock:
    """A lock of a file, which ends with its process at the latest."""

    def __init__(self, path: str) -> None:
        self._file, self._is_lent = os.open(path, os.O_CREAT | os.O_RDWR), False
        self.waited_s = 0.0
        """How long this process has waited for it so far."""

    def acquire(self) -> None:
        begin = time.perf_counter()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.waited_s += time.perf_counter() - begin

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

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Acquires the lock. Another process has the GPU while engines are compiled, and this one
        while our backend times a graph's groups."""

        def built(timer: GpuTimer, candidates: Any) -> contextlib.AbstractContextManager[None]:
            needs_no_compiling = all(not c.is_compiled or c.text in timer.plans for c in candidates)
            return contextlib.nullcontext() if needs_no_compiling else self.lent()

        with (
            _within(built, GpuTimer, "_built"),
            _within(lambda *_, **__: self._taken_back(), programs, "fuse_judged"),
        ):
            self.acquire()
            try:
                yield
            finally:
                self.release()

    @contextlib.contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Acquires the lock if it is lent, and releases it again."""
        if not self._is_lent:
            yield
            return
        self.acquire()
        try:
            yield
        finally:
            self.release()


def _within(
    context: Callable[..., contextlib.AbstractContextManager[None]], owner: Any, name: str
) -> contextlib.AbstractContextManager[Any]:
    """Makes a function run within ``context``, which gets its arguments."""
    function = getattr(owner, name)

    def run(*args: Any, **more: Any) -> Any:
        with context(*args, **more):
            return function(*args, **more)

    return mock.patch.object(owner, name, run)
