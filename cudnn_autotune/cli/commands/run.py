"""``cudnn-autotune run``."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

import click

from cudnn_autotune import sampling
from cudnn_autotune.cli.options import check_modes, refuse
from cudnn_autotune.nn.models.process_summary import say_summary
from cudnn_autotune.nn.models.process_wide import enable

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
    starts are not affected, unless CUDNN_AUTOTUNE_ENABLE=1 is in the environment. With torchrun:
    `torchrun --no-python ... cudnn-autotune run SCRIPT`.
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
    say_summary()
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
