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

import torch

# Of Dynamo's callbacks: what is not among them may be timed on the GPU.
_COMPILING = ("DYNAMO", "LAZY_BACKWARD")


class GpuLock:
    """A lock of a file, which ends with its process at the latest."""

    def __init__(self, path: str) -> None:
        self._file, self._is_held = os.open(path, os.O_CREAT | os.O_RDWR), False
        self.waited_s = 0.0
        """How long this process has waited for it so far."""

    def acquire(self) -> None:
        begin = time.perf_counter()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.waited_s += time.perf_counter() - begin
        self._is_held = True

    def release(self) -> None:
        """Gives back the GPU with the memory that is not in use, when it has nothing left to do."""
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._is_held = False

    def held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that times something: while it runs, this process has the GPU."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_held:
                return function(*args, **kwargs)
            self.acquire()
            try:
                return function(*args, **kwargs)
            finally:
                self.release()

        return run

    @contextlib.contextmanager
    def lent_while_compiling(self) -> Iterator[None]:
        """Releases the lock, which is held, while Dynamo compiles."""
        from torch._dynamo.callback import callback_handler

        def begin(args: Any) -> None:
            if args.callback_trigger.name in _COMPILING:
                self.release()

        def end(args: Any) -> None:
            if args.callback_trigger.name in _COMPILING:
                self.acquire()

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
