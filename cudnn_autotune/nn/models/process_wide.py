"""``enable`` and ``disable``: tuned convolutions for all that calls PyTorch's.

Every convolution of PyTorch, and every derivative of one, ends in ``aten::convolution`` or
``aten::convolution_backward``. ``csrc/aten_kernels.cpp`` puts kernels of its own below autograd,
autocast, ``torch.func`` and tracing, in the place of PyTorch's kernels for CUDA. What those layers
record or transform is therefore PyTorch's own operator, as it is without this package. The kernels
are put there when this package is imported, and call PyTorch's until they are enabled: PyTorch's
dispatcher must not be written while other threads run convolutions. Norms are served likewise
(``csrc/aten_norms.h``).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from cudnn_autotune.core.display import count
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.nn.norm_choices import norm_choices
from cudnn_autotune.nn.norm_measuring import PYTORCH, NormChoice
from cudnn_autotune.store.notices import warn_once
from cudnn_autotune.tuning import gain
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices, fallbacks
from cudnn_autotune.tuning.settings import check_policy

VARIABLE = "CUDNN_AUTOTUNE_ENABLE"


class Enabled:
    """A context, returned by :func:`enable`, whose end restores the state before that call."""

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


def enable(sampling: str | None = None, workspace_limit: int | None = None) -> Enabled:
    """Tunes all convolutions of the process that PyTorch computes on a CUDA device.

    From here on ``torch.nn.functional.conv*``, ``torch.nn.Conv*``, ``torch.conv*`` and their
    derivatives run the engine that a search chose for their shape, in all threads and with no
    change of a model, much as ``torch.backends.cudnn.benchmark = True`` is used. So do the
    convolutions that code compiled by ``torch.compile`` calls. Where cuDNN cannot compute a call,
    PyTorch does, and ``cudnn_autotune.fallbacks()`` counts it. Training batch norms,
    instance norms and forwards of group norms run the faster of PyTorch's kernels and this
    package's: ``cudnn_autotune.norm_choices()`` says which. Other devices are not affected.

    Called again, it replaces the mode and the limit. As a context manager it restores what was in
    force before::

        with cudnn_autotune.enable():
            loss = model(batch).sum()
            loss.backward()

    A context holds for all threads, like those of ``torch.backends.cudnn.flags``. A derivative uses
    what is in force when it is computed, that of a norm what its forward used. Batch and
    instance norms in a ``torch.utils.checkpoint`` that is not reentrant are PyTorch's. Layers of
    this package keep their own arguments. With a CPU-only torch, or without a GPU, the function
    has no effect.

    Args:
        sampling: one of ``cudnn_autotune.sampling.names()``; None stands for the settings' at the
            time of each call.
        workspace_limit: the most bytes of workspace that an engine may need; None stands for the
            settings'.

    Returns:
        A context manager, which need not be used.

    Raises:
        ValueError: the mode is unknown, or the limit negative. Nothing is changed then.
    """
    check_policy(sampling, workspace_limit)
    return Enabled(sampling, workspace_limit)


def disable() -> None:
    """Leaves the convolutions of the process to PyTorch again. It may be called at any time."""
    if extension_available():
        _C.exchange_process_wide(None)


def check_variable(text: str, variable: str = VARIABLE) -> bool:
    """Returns whether ``text`` asks for :func:`enable`; raises ValueError if it is not 1 or 0."""
    if text not in ("0", "1"):
        raise ValueError(f"{variable} must be 1 or 0, got {text!r}")
    return text == "1"


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Enables the process, with a summary at its end, if ``CUDNN_AUTOTUNE_ENABLE`` is 1. A value
    that is not allowed causes a warning and is passed over."""
    text = environ.get(VARIABLE, "").strip()
    try:
        if text and check_variable(text):
            enable()
            atexit.register(_at_end)
    except ValueError as error:
        warn_once((VARIABLE, text), f"{error}: it is passed over")


def leave_environment() -> None:
    """Undoes :func:`read_environment`, in a program that decides itself what is enabled."""
    if VARIABLE in os.environ:
        disable()
        atexit.unregister(_at_end)


def _at_end() -> None:
    """Prints the summary, unless no convolution or norm ran on a CUDA device: every process that
    imports torch comes here, and most are not what the variable is meant for."""
    if choices() or fallbacks() or norm_choices():
        say_summary()


def say_summary() -> None:
    """Prints the :func:`summary` of the process on standard error, of several ranks on the first
    one's."""
    if os.environ.get("RANK", "0") == "0":
        for line in summary(choices(), fallbacks(), norm_choices()):
            print(f"cudnn-autotune: {line}", file=sys.stderr)


def summary(
    made: Sequence[Choice], left: Mapping[str, int], norms: Sequence[NormChoice]
) -> list[str]:
    """Says in a few lines what was tuned in a process, and what it gains.

    Args:
        made: the choices of the process.
        left: the number of calls that PyTorch served, by reason.
        norms: how the norms of the process are computed.
    """
    lines = []
    if made:
        origins = {choice.origin for choice in made}
        searched = [choice for choice in made if choice.origin == "tuned"]
        seconds = sum(choice.tuning_ms for choice in searched) / 1e3
        text = f"{count(len(made), 'convolution')} served"
        if origins != {"store"}:
            text += f", {len(searched)} of them tuned in this run ({seconds:.1f} s)"
        lines.append(f"{text}, {sum(c.origin == 'store' for c in made)} known from the store")
        lines += gain.lines(choice.decision for choice in made)
    else:
        lines.append("no convolution was served: none ran on a CUDA device")
    if norms:
        lines.append(_of_norms(norms))
    others = {reason: n for reason, n in left.items() if "own path was chosen" not in reason}
    if others:
        reason = max(others, key=lambda key: others[key])
        lines.append(f"{count(sum(others.values()), 'call')} left to PyTorch, mostly: {reason}")
    return lines


def _of_norms(norms: Sequence[NormChoice]) -> str:
    """Says how many norms are served, and what that gains where this process has timed it."""
    served = [norm for norm in norms if norm.is_served]
    text = f"{len(served)} of {count(len(norms), 'norm')} served"
    timed = [norm.times_ms for norm in served if norm.times_ms]
    if not timed:
        return text
    before_ms, after_ms = sum(t[PYTORCH] for t in timed), sum(min(t.values()) for t in timed)
    return (
        f"{text}, {before_ms:.3f} -> {after_ms:.3f} ms for one call of {len(timed)} "
        f"({before_ms / after_ms:.2f}x)"
    )
