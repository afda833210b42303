"""``enable`` and ``disable``: tuned convolutions for all callers of PyTorch's.

Every convolution of PyTorch, and every derivative of one, ends in ``aten::convolution`` or
``aten::convolution_backward``. ``csrc/conv/aten_kernels.cpp`` replaces PyTorch's kernels for CUDA,
below autograd, autocast, ``torch.func`` and tracing. So those layers record or transform PyTorch's
own operator, as without this package. The kernels are registered when this package is imported, and
call PyTorch's until they are enabled: PyTorch's dispatcher must not be written while other threads
run convolutions. Norms are served likewise (``csrc/norm/aten_norms.h``).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from types import TracebackType

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.models.process_summary import say_summary, served_anything
from cudnn_autotune.sampling.strategy import SamplingMode
from cudnn_autotune.tuning.settings import ENABLE_VARIABLE, check_policy, value_of
from cudnn_autotune_autoload import run_sampling


class Enabled:
    """The context of :func:`enable`, whose end restores the state before that call."""

    def __init__(self, sampling: str | None, workspace_limit: int | None) -> None:
        if extension_available():
            limit = -1 if workspace_limit is None else workspace_limit
            self._policy = _C.ProcessWidePolicy(sampling or "", limit)
            self._former = _C.exchange_process_wide(self._policy)

    def __enter__(self) -> None:
        if extension_available():
            _C.exchange_process_wide(self._policy)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if extension_available():
            _C.exchange_process_wide(self._former)


def enable(
    sampling: SamplingMode | str | None = None, workspace_limit: int | None = None
) -> Enabled:
    """Tunes all convolutions of the process that PyTorch computes on a CUDA device.

    From here on ``torch.nn.functional.conv*``, ``torch.nn.Conv*``, ``torch.conv*`` and their
    derivatives run the engine that a search chose for their shape. This holds in all threads and
    without a change of a model, as with ``torch.backends.cudnn.benchmark = True``, and for code
    compiled by ``torch.compile``. If cuDNN cannot compute a call, PyTorch does, and
    ``cudnn_autotune.fallbacks()`` counts it. Training batch norms, instance norms and forwards of
    group norms run the faster of PyTorch's kernels and this package's
    (``cudnn_autotune.norm_choices()``). Other devices are not affected.

    Called again, it replaces the mode and the limit. As a context manager it restores the earlier
    state::

        with cudnn_autotune.enable():
            loss = model(batch).sum()
            loss.backward()

    A context holds for all threads, as of ``torch.backends.cudnn.flags``. A derivative uses the
    state in force when it is computed; a norm's uses its forward's. Batch and instance norms in a
    ``torch.utils.checkpoint`` that is not reentrant are PyTorch's. Layers of this package keep
    their own arguments. With a CPU-only torch, or without a GPU, the function has no effect.

    Args:
        sampling: one of ``cudnn_autotune.sampling.names()``; None stands for the settings' at the
            time of each call.
        workspace_limit: the limit of an engine's workspace in bytes; None stands for the settings'.

    Returns:
        A context manager, which need not be used.

    Raises:
        ValueError: the mode is unknown, or the limit negative. The state is then unchanged.
    """
    check_policy(sampling, workspace_limit)
    return Enabled(sampling, workspace_limit)


def disable() -> None:
    """Leaves the convolutions of the process to PyTorch again. It may be called at any time."""
    if extension_available():
        _C.exchange_process_wide(None)


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Enables the process, with a summary at its end, if it was started by ``cudnn-autotune run``,
    or ``CUDNN_AUTOTUNE_ENABLE`` is 1. Another value of the variable causes a warning and is
    ignored."""
    mode = run_sampling(environ)
    if mode is not None:
        enable(mode or None)
        atexit.register(_at_end_of_run, os.getpid())
        return
    if value_of(ENABLE_VARIABLE, environ):
        enable()
        atexit.register(_at_end)


def leave_environment() -> None:
    """Undoes :func:`read_environment`, in a program that calls ``enable`` itself."""
    if ENABLE_VARIABLE in os.environ or run_sampling() is not None:
        disable()
        atexit.unregister(_at_end)
        atexit.unregister(_at_end_of_run)


def _at_end() -> None:
    """Prints the summary if a convolution or norm ran on a CUDA device. Every process that imports
    torch comes here, and most have none."""
    if served_anything():
        say_summary()


def _at_end_of_run(process: int) -> None:
    """Prints the summary, but not at the end of a process that the script has forked."""
    if os.getpid() == process:
        say_summary()
