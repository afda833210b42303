"""Importing is quick, touches no GPU and leaves torch as it was; the command line works."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch
from support.processes.subprocesses import evaluate, python
from support.tuning.strategies import AT_ONCE

import cudnn_autotune as ca
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune_cli import COMMANDS, main


def command_line(*arguments: str, **keywords: object):  # type: ignore[no-untyped-def]
    """The installed script if there is one, else the module that it calls."""
    script = shutil.which("cudnn-autotune", path=os.path.dirname(sys.executable))
    if script is None:
        return python("-m", "cudnn_autotune_cli", *arguments, **keywords)
    return python(script, *arguments, **keywords)


def test_importing_is_quiet_and_light() -> None:
    """It prints nothing, touches no GPU, and brings no module that only some programs need."""
    code = (
        "import sys, torch; before = set(sys.modules); import cudnn_autotune\n"
        "compilers = ('torch._inductor', 'torch._dynamo', 'torch._functorch')\n"
        "new = set(sys.modules) - before\n"
        "loaded = {name.split('.')[0] for name in new} | {m for m in new if m in compilers}\n"
        "loaded |= {name for name in new if name.startswith('cudnn_autotune.')}\n"
        "print(torch.cuda.is_initialized(), *sorted(loaded))"
    )
    done = python("-W", "error::UserWarning:cudnn_autotune", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "cudnn_autotune" not in done.stderr
    (line,) = done.stdout.splitlines()
    is_initialised, *loaded = line.split()
    assert is_initialised == "False"
    assert "cudnn_autotune" in loaded
    slow = {"rich", "matplotlib", "triton", "scipy", "pandas", "setuptools", "jinja2"}
    assert not set(loaded) & {*slow, "sympy", "mpmath", "networkx", "multiprocessing", "click"}
    assert not [name for name in loaded if name.startswith("torch.")]
    rooms = [name.split(".")[1] for name in loaded if name.startswith("cudnn_autotune.")]
    assert len(rooms) <= 80
    assert not {"audit", "cli", "distributed", "online"} & set(rooms)


@pytest.mark.search
def test_searching_for_an_absent_gpu_initialises_no_cuda() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("an earlier test has used the GPU that is here")
    problem = ca.ConvProblem("fprop", input_shape=(2, 8, 9, 9), weight_shape=(8, 8, 3, 3))
    assert ca.expert.candidates(problem, device="l4")
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["nope"]], ids=str)
def test_what_needs_no_torch_imports_none(arguments: list[str]) -> None:
    code = (
        "import sys; from cudnn_autotune_cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    assert evaluate(code).splitlines()[-1] == "False"


def test_help_says_of_each_command_what_its_own_does() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in COMMANDS}
    assert main.list_commands(context) == sorted(commands)
    for name, command in commands.items():
        assert command.name == name
        assert command.get_short_help_str(limit=1000) == COMMANDS[name][1]
    assert main.get_command(context, "nope") is None


def test_a_bad_variable_leaves_the_commands_usable() -> None:
    env = {
        "CUDNN_AUTOTUNE_SAMPLING": "nope",
        "CUDNN_AUTOTUNE_WORKSPACE_LIMIT": "lots",
        "CUDNN_AUTOTUNE_CACHE": "no",
    }
    for arguments in (["--help"], ["env"]):
        done = command_line(*arguments, env=env)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert "sampling         nope" in done.stdout


def test_an_unknown_command_is_refused_and_the_nearest_is_named() -> None:
    done = command_line("tnue")
    assert done.returncode == 2
    assert "No such command 'tnue'. Did you mean 'tune'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_completes_commands_and_options() -> None:
    for words, wanted in (("repo", "report"), ("tune --js", "--json")):
        asked = {
            "_CUDNN_AUTOTUNE_COMPLETE": "bash_complete",
            "COMP_WORDS": f"cudnn-autotune {words}",
            "COMP_CWORD": str(len(words.split())),
        }
        done = command_line(env=asked)
        assert (done.returncode, done.stdout) == (0, f"plain,{wanted}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.search
def test_demo_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = command_line(
        "demo",
        "--details",
        cwd=tmp_path / "here",
        env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "here").iterdir()), "the demo leaves no file behind"
    assert "no gpu" in done.stdout.lower()
    # In a pipe a table is lines of cells apart by tabs.
    rows = [line.partition("\t")[0] for line in done.stdout.splitlines() if "\t" in line]
    assert rows == ["mode", *AT_ONCE]
    assert not set("┃│┏┡├└") & set(done.stdout)
    assert "…" not in done.stdout


@pytest.mark.skipif(extension_available(), reason="is about a build with a CPU-only torch")
@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--details"],
        ["tune", "--input", "1,3,8,8", "--weight", "4,3,3,3"],
    ],
    ids=str,
)
def test_a_command_that_needs_cudnn_says_so(arguments: list[str]) -> None:
    done = command_line(*arguments)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "CPU-only torch" in done.stderr or "this torch has no CUDA" in done.stderr
