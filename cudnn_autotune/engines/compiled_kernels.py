"""CUDA kernels as machine code. NVRTC compiles each once in a process, unless an earlier process
has kept it. A process that asks for many kernels forgets the oldest."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from cudnn_autotune.core import nvrtc
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.recipe import Kernel

Find = Callable[[str, str], bytes | None]
"""(function, digest) -> the cubin that is kept, or None. It must not raise."""
Keep = Callable[[str, str, bytes], None]
"""Keeps a cubin under its function and digest. It must not raise."""

# The number of kernels, some 50 KB each, that this process remembers: the last ones used. Others
# are read back or compiled again if a dropped plan is needed again.
_MOST = 512

_lock = ForkSafeLock()
_compiled: OrderedDict[str, Future[bytes]] = OrderedDict()
_kept: tuple[Find, Keep] | None = None


def keep_kernels(find: Find, keep: Keep) -> None:
    """Sets the functions that keep kernels for later processes. Both are called on any thread."""
    global _kept
    _kept = (find, keep)


def cubin(kernel: Kernel, compute_capability: tuple[int, int]) -> bytes:
    """Returns the machine code of a kernel for GPUs of a compute capability.

    Threads that ask for a kernel that is being compiled wait, so that it is compiled once.

    Raises:
        PlanError: it does not compile, or NVRTC is not there. The compiler's log is in the message.
    """
    key = digest(kernel, compute_capability)
    mine = Future[bytes]()
    with _lock:
        found = _asked_for(key)
        if found is None:
            _remember(key, mine)
    if found is not None:
        return found.result()
    try:
        code = _found_or_compiled(kernel, _options(kernel, compute_capability), key)
    except BaseException as error:
        with _lock:
            _compiled.pop(key, None)  # the next caller tries again
        mine.set_exception(error)
        raise
    mine.set_result(code)
    return code


def is_found(kernel: Kernel, compute_capability: tuple[int, int]) -> bool:
    """Returns whether this process or an earlier one has compiled the kernel, so that :func:`cubin`
    does not compile."""
    key = digest(kernel, compute_capability)
    with _lock:
        found = _asked_for(key)
    if found is not None:
        return found.done() and found.exception() is None
    code = _kept_code(kernel, key)
    if code is None:
        return False
    kept = Future[bytes]()
    kept.set_result(code)
    with _lock:
        if key not in _compiled:
            _remember(key, kept)
    return True


def digest(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """Returns a text that is equal for two kernels only if :func:`cubin` is equal for both."""
    options = _options(kernel, compute_capability)
    depends_on = [kernel.source, kernel.function, options, nvrtc.version()]
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()


def _asked_for(key: str) -> Future[bytes] | None:
    """Returns the future of the kernel's code, if it is remembered, and makes it the last to be
    dropped. The caller holds the lock, here and in :func:`_remember`."""
    if key in _compiled:
        _compiled.move_to_end(key)
    return _compiled.get(key)


def _remember(key: str, code: Future[bytes]) -> None:
    _compiled[key] = code
    while len(_compiled) > _MOST:
        _compiled.popitem(last=False)


def _options(kernel: Kernel, compute_capability: tuple[int, int]) -> list[str]:
    major, minor = compute_capability
    architecture = f"--gpu-architecture=sm_{major}{minor}{kernel.arch_suffix}"
    defines = [f"-D{name}={value}" for name, value in kernel.defines]
    return [architecture, "--std=c++17", *defines]


def _found_or_compiled(kernel: Kernel, options: list[str], key: str) -> bytes:
    if code := _kept_code(kernel, key):
        return code
    code = nvrtc.compile_kernel(kernel.source, kernel.function, options)
    if _kept is not None:
        _kept[1](kernel.function, key, code)
    return code


def _kept_code(kernel: Kernel, key: str) -> bytes | None:
    return None if _kept is None else _kept[0](kernel.function, key)


def clear() -> None:
    """Forgets the kernels of this process; loaded kernels stay loaded."""
    with _lock:
        _compiled.clear()


# The threads that were compiling are not in a child process.
os.register_at_fork(after_in_child=clear)
