"""The command line, ``cudnn-autotune``.

It lies beside the package because the package's import loads the extension, and with it torch:
1.2 s of CPU time, where the help takes 0.07 s. Ctrl-C ends the process quietly while torch is
imported.
"""

from __future__ import annotations

import codecs
import difflib
import getopt
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from typing import Any

import click

from cudnn_autotune_autoload import ENTRY_POINT, ENTRY_POINT_GROUP, run_environment

# Each command's place in the package, or none if it is here, and the first sentence of its help.
COMMANDS = {
    "audit": (
        "audit.command:audit",
        "Measure how far each mode's picks are from the fastest, and what picking costs.",
    ),
    "check": (
        "cli.commands.check:check",
        "Build candidates for one layer, run them, and compare them with a reference.",
    ),
    "compare": (
        "cli.commands.compare:compare",
        "Run a model by PyTorch and by this package in several ways, and name the fastest.",
    ),
    "demo": (
        "cli.commands.demo:demo",
        "Show what this GPU gains on two well-known layers, by every sampling mode.",
    ),
    "diff": (
        "cli.commands.diff:diff",
        "Tell how two stores (folders or files) differ; exit status 1 where they do, 2 where one "
        "of them cannot be read, or not all of it.",
    ),
    "env": (
        "cli.commands.env:env",
        "Show what identifies this machine's decisions, where they are kept, and what is in force.",
    ),
    "export": (
        "cli.commands.exchange:export",
        "Write decisions into FILE (.json), to ship them with an application.",
    ),
    "import": ("cli.commands.exchange:import_", "Take over the decisions of FILEs into the store."),
    "prune": (
        "cli.commands.prune:prune",
        "Remove decisions from a store: those that all of the given options are about.",
    ),
    "report": (
        "cli.commands.report:report",
        "Write one HTML page: what was chosen and why, with every interval, and what it gains.",
    ),
    "run": (":run", "Run a Python script, unchanged, with tuned convolutions."),
    "show": ("cli.commands.show:show", "Show what was chosen, and why: the decisions of a store."),
    "tune": (
        "cli.commands.tune:tune",
        "Tune a layer, or every convolution of a model, into the store.",
    ),
}
_ASCII = str.maketrans("×–≈µ…", "x-~u.")
_STRICT = ("strict", "surrogateescape")
_INTERRUPTED = 128 + signal.SIGINT
_PYTHONS_OPTIONS = "bBc:dEhiIJm:OPqRsStuvVW:xX:?"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # the variable that keeps torch from its entry points


class Commands(click.Group):
    """Imports a command when it is called."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command; says in one line why a file or the output cannot be written or read."""
        # In the C locale errors are "surrogateescape", which only takes what was read so.
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _STRICT:
            codecs.register_error("cudnn_autotune", _in_ascii)
            sys.stdout.reconfigure(errors="cudnn_autotune")
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                if sys.stdout is not None:  # None: the shell has closed it
                    sys.stdout.flush()  # Python itself would show a traceback at its exit
        except BrokenPipeError:  # nobody reads the output to its end, as behind `| head`
            _discard_output()
            sys.exit(1)
        except OSError as error:
            _discard_output()
            where = error.filename or "the output cannot be written"
            with suppress(OSError):
                click.echo(f"Error: {where}: {error.strerror or error}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names the nearest command where there is none of the name."""
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if near and near != args[:1]:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        if not module:
            return run
        try:
            with _ending_quietly(), _warnings_in_lines():
                imported = importlib.import_module(f"cudnn_autotune.{module}")
                command = getattr(imported, name)
        except ImportError as error:
            if error.name:  # Python's own error, which names a module
                raise
            raise click.ClickException(str(error)) from error  # the build does not fit
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Makes an error of a command that needs cuDNN, where torch has none, one line. What does
        not print in an error's text, as in an exception of a user's model, is replaced."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if not error.message.isprintable():
                from cudnn_autotune.core.display import printable

                lines = map(printable, error.message.split("\n"))
                error.message = "\n".join(lines)  # type: ignore[misc]
            raise
        except RuntimeError as error:
            from cudnn_autotune.core.extension import CpuOnlyBuild

            if isinstance(error, CpuOnlyBuild):
                raise click.ClickException(str(error)) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _discard_output() -> None:
    """Makes what is still to be written vanish, so that Python does not try it at its exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """Makes Ctrl-C end the process at once.

    A KeyboardInterrupt would show a traceback from the depth of what is being imported, or be
    swallowed there.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """Prints each warning as one line on standard error, without the code that it came from."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: object, **__: object) -> None:
            from cudnn_autotune.core.display import printable

            click.echo(printable(f"Warning: {' '.join(str(message).split())}"), err=True)

        warnings.showwarning = show
        yield


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that a terminal cannot show.

    Characters of our own texts become ASCII of the same width, so that tables stay in line. Others
    are escaped.
    """
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cudnn_autotune", prog_name="cudnn-autotune")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Search, choose, remember and run cuDNN's convolution engines."""
    if ctx.invoked_subcommand == run.name:  # it imports nothing
        return
    from cudnn_autotune.core.signals import ending_as_by_interrupt
    from cudnn_autotune.models.process_wide import leave_environment

    leave_environment()
    ctx.with_resource(ending_as_by_interrupt())
    ctx.with_resource(_warnings_in_lines())


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--sampling", "mode", help="The sampling mode. [default: the one in force]")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as of `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(mode: str | None, is_module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a Python script, unchanged, with tuned convolutions.

    As `python SCRIPT ARGUMENTS...`, but that cudnn_autotune.enable() is in force once the script
    has imported torch. A summary on standard error then says at the end what was tuned, and what it
    gains. Processes that the script starts are not affected, unless CUDNN_AUTOTUNE_ENABLE=1 is in
    the environment. With torchrun: `torchrun --no-python ... cudnn-autotune run SCRIPT`.
    """
    if mode is not None:
        _check_mode(mode)
    if os.environ.get(_AUTOLOAD, "1") != "1":
        text = f"run needs {_AUTOLOAD} to be 1 or not set, got {os.environ[_AUTOLOAD]!r}"
        raise click.ClickException(text)
    if ENTRY_POINT not in entry_points(group=ENTRY_POINT_GROUP).names:
        raise click.ClickException("run needs the package to be installed, not only on sys.path")
    os.environ.update(run_environment(mode))
    # Python takes a name that begins with a dash for an option.
    before = ["-m"] if is_module else ["--"] if script.startswith("-") and script != "-" else []
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # The program takes the place of this one, so that Python itself runs the script.
    command = [sys.executable, *_interpreter_options(), *before, script, *arguments]
    os.execv(sys.executable, command)


def _check_mode(mode: str) -> None:
    with _ending_quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script's process gives them
        from cudnn_autotune import sampling
        from cudnn_autotune.tools.options import check_modes
    check_modes("--sampling", [mode], sampling.names())


def _interpreter_options() -> list[str]:
    """Returns the options that Python itself was started with, as in ``python -O -m ...``."""
    # Python's options and a script, or -m and a module, stand before the arguments.
    begin = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    try:
        options, rest = getopt.getopt(begin, _PYTHONS_OPTIONS, ["check-hash-based-pycs="])
    except getopt.GetoptError:  # the program was not started by Python's command line
        return []
    given = begin[: len(begin) - len(rest)]
    name, value = options[-1] if options else ("", "")
    if name in ("-c", "-m"):
        last = given.pop().removesuffix(value) or given.pop()
        if last != name:  # as -O in -Om
            given.append(last.removesuffix(name[1]))
    return given


if __name__ == "__main__":
    main(prog_name="cudnn-autotune")
