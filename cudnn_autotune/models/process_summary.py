"""The summary of a process that ran under ``enable``: the served calls, and their gain."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cudnn_autotune.core.display import count, milliseconds
from cudnn_autotune.norms.choices import norm_choices
from cudnn_autotune.norms.memory import PYTORCH, NormChoice
from cudnn_autotune.store.locked import is_miss
from cudnn_autotune.tuning import gain
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices, fallbacks


def served_anything() -> bool:
    """Returns whether a convolution or a norm has run on a CUDA device."""
    return bool(choices() or fallbacks() or norm_choices())


def say_summary() -> None:
    """Prints the :func:`summary` of the process on standard error; of several ranks the first one
    prints. If the program has closed it, or nobody reads it, the exit status stays the
    program's."""
    stream = sys.stderr
    if stream is None or os.environ.get("RANK", "0") != "0":
        return
    lines = summary(choices(), fallbacks(), norm_choices())
    try:
        stream.write("".join(f"cudnn-autotune: {line}\n" for line in lines))
        stream.flush()
    except ValueError:  # it is closed
        pass
    except OSError:  # Python would try again, and end with status 120
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def summary(
    made: Sequence[Choice], left: Mapping[str, int], norms: Sequence[NormChoice]
) -> list[str]:
    """Returns a few lines on the tuned problems of a process, and their gain.

    Args:
        made: the choices of the process.
        left: the number of calls that PyTorch served, by reason.
        norms: the choices for the norms of the process.
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
        lines.append("nothing was tuned: no convolution ran on a GPU")
    if norms:
        lines.append(_of_norms(norms))
    missing = sum(n for reason, n in left.items() if is_miss(reason))
    if missing:
        lines.append(f"the locked store lacks {count(missing, 'shape')}, which PyTorch computes")
    others = {
        reason: n
        for reason, n in left.items()
        if "own path was chosen" not in reason and not is_miss(reason)
    }
    if others:
        reason = max(others, key=lambda key: others[key])
        lines.append(f"{count(sum(others.values()), 'call')} left to PyTorch, mostly: {reason}")
    return lines


def _of_norms(norms: Sequence[NormChoice]) -> str:
    """Returns the number of served norms, and their gain if this process has timed it, in words."""
    served = [norm for norm in norms if norm.is_served]
    text = f"{len(served)} of {count(len(norms), 'norm')} served"
    timed = [norm.times_ms for norm in served if norm.times_ms]
    if not timed:
        return text
    before_ms, after_ms = sum(t[PYTORCH] for t in timed), sum(min(t.values()) for t in timed)
    times = f"{milliseconds(before_ms)} -> {milliseconds(after_ms)} ms"
    return f"{text}, {times} for one call of {len(timed)} ({before_ms / after_ms:.2f}x)"
