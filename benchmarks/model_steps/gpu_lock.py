"""The GPU is one process's at a time; while a model is compiled, which needs the CPU only, another
process has it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from cudnn_autotune.nn.models import backend

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
        """From now on, it is not lent while our backend, after it has found the groups of a graph,
        times them, which ends when it fuses some."""
        find_groups, fuse = backend.find_groups, backend.fuse

        def found(*args: Any) -> Any:
            groups = find_groups(*args)
            if self._is_lent:
                self.acquire()
            return groups

        def fused(*args: Any) -> Any:
            if self._is_lent:
                self.release()
            return fuse(*args)

        backend.find_groups, backend.fuse = found, fused
