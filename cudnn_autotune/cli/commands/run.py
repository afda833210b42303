"""``cudnn-autotune run``."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import click

from cudnn_autotune import sampling
from cudnn_autotune.cli.options import check_modes, refuse
from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count
from cudnn_autotune.nn.models.process_wide import enable
from cudnn_autotune.tuning import gain
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices, fallbacks

_INTERRUPTED = 130
# The files whose parts of a traceback come before the script's.
_RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--sampling", "mode", help="The sampling mode. [default: the one in force]")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as of `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(mode: str | None, is_module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a Python script, unchanged, with tuned convolutions.

    As `python SCRIPT ARGUMENTS...`, but that cudnn_autotune.enable() is in force. A summary on
    standard error says at the end what was tuned, and what it gains. Processes that the script
    starts are not affected. With torchrun: `torchrun --no-python ... cudnn-autotune run SCRIPT`.
    """
    check_modes("--sampling", [] if mode is None else [mode], sampling.names())
    if not is_module and not Path(script).exists():
        raise refuse("SCRIPT", f"{script!r} does not exist")
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    # Python has the script's folder in this place, and `python -m` the current one.
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    status = 0
    with enable(mode):
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = _status(end)
        except BaseException as error:
            if isinstance(error, ImportError) and _is_of_runpy(error):
                raise refuse("SCRIPT", str(error)) from error
            traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
            status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if os.environ.get("RANK", "0") == "0":
        for line in summary(choices(), fallbacks()):
            say(f"cudnn-autotune: {line}", err=True)
    sys.exit(status)


def _status(end: SystemExit) -> int:
    """Returns the exit status that Python has for a call of ``sys.exit``; prints the message of one
    that was called with a text."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _is_of_runpy(error: BaseException) -> bool:
    """Whether nothing of the script has run: it is no module or folder that can be run."""
    end = _of_script(error.__traceback__)
    return end is not None and end.tb_frame.f_code.co_filename in _RUNNERS


def _of_script(begin: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that is the script's; all of it if none is."""
    frame = begin
    while frame is not None and frame.tb_frame.f_code.co_filename in _RUNNERS:
        frame = frame.tb_next
    return frame or begin


def summary(made: Sequence[Choice], left: Mapping[str, int]) -> list[str]:
    """Says in a few lines what was tuned in a process, and what it gains.

    Args:
        made: the choices of the process.
        left: the number of calls that PyTorch served, by reason.
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
    others = {reason: n for reason, n in left.items() if "own path was chosen" not in reason}
    if others:
        reason = max(others, key=lambda key: others[key])
        lines.append(f"{count(sum(others.values()), 'call')} left to PyTorch, mostly: {reason}")
    return lines
