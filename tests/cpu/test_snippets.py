"""Every snippet of README.md and docs/ runs, with the imports that it shows, and every command of a
page is one that ``cudnn-autotune`` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from support import checkout
from support.documents import PAGES, YOURS, programs, snippets
from support.processes.subprocesses import evaluate_forked, python

from cudnn_autotune_cli import main

ELSEWHERE = {
    "docs/how-to/recipes.md": "tests/cpu/test_recipes.py",
    "docs/how-to/own-implementation.md": "tests/cpu/implementing/test_user_implementations.py",
}
PROGRAMS = programs(ELSEWHERE)
# In this snippet a GPU is asked for its candidates at last.
OF_THIS_GPU = "docs/how-to/audit.md, 0, Look before you run"
COMPILED = re.compile(r"torch\.compile|cudnn_autotune\.compare")


def on_the_cpu(program: str) -> str:
    for there, here in ((".cuda()", ".cpu()"), ('device="cuda"', 'device="cpu"')):
        program = program.replace(there, here)
    return program


def test_pages_that_are_tested_elsewhere() -> None:
    for page, file in ELSEWHERE.items():
        assert Path(page).name in (checkout.ROOT / file).read_text()


@pytest.mark.parametrize(
    ("name", "program"),
    [
        pytest.param(name, program, id=name, marks=pytest.mark.slow)
        if COMPILED.search(program)
        else pytest.param(name, program, id=name)
        for name, program in PROGRAMS
    ],
)
def test_a_snippet(name: str, program: str, tmp_path: Path) -> None:
    """Without a GPU: where one names CUDA it gets the CPU."""
    program = on_the_cpu(program)
    if name == OF_THIS_GPU:
        before, line, after = program.partition("texts = ")
        program = before + "try:\n    " + line + after.splitlines()[0]
        program += "\nexcept ValueError as error:\n    assert 'is not here' in str(error)"
        program += "\nelse:\n    raise AssertionError"
    begin = f"import os\nos.chdir({str(tmp_path)!r})\n"
    if "cudnn_autotune.compare" in program:  # it starts processes that import the program
        (tmp_path / "program.py").write_text(YOURS + program)
        done = python("program.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        evaluate_forked(begin + YOURS + program)


def commands(page: str) -> list[list[str]]:
    """The arguments of each call of ``cudnn-autotune`` in the blocks of a page."""
    found = []
    for snippet in snippets(page):
        if snippet.language not in ("", "bash"):
            continue
        for line in re.split(r"\n|&&", snippet.text.replace("\\\n", " ")):
            if "cudnn-autotune " in line:
                words = shlex.split(line, comments=True)
                found.append(words[words.index("cudnn-autotune") + 1 :])
    return found


ALL_PAGES = [*PAGES, "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if commands(page)])
def test_commands_are_taken(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are parsed, and not run."""
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "forum.json", "decisions.json"):
        (tmp_path / file).write_text("")
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    for arguments in commands(page):
        with main.make_context("cudnn-autotune", list(arguments)) as context:
            name, command, rest = main.resolve_command(context, list(arguments))
            assert command is not None, name
            command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_in_sentences_have_these_options(page: str) -> None:
    text = (checkout.ROOT / page).read_text()
    for words in re.findall(r"`cudnn-autotune ([a-z][^`]*)`", text):
        name, *rest = words.split()
        with click.Context(main) as context:
            command = main.get_command(context, name)
        assert command is not None, name
        known = {text for parameter in command.params for text in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= known


def test_benchmarks_have_these_options() -> None:
    scripts = checkout.ROOT / "benchmarks"
    sources = "".join(path.read_text() for path in scripts.rglob("*.py"))
    blocks = [s.text for s in snippets("benchmarks/README.md") if "python benchmarks/" in s.text]
    assert blocks
    for word in " ".join(shlex.split(" ".join(blocks))).split():
        is_script = word.startswith("benchmarks/") and not word.startswith("benchmarks/results")
        assert not is_script or (checkout.ROOT / word).exists()
        assert not word.startswith("--") or f'"{word}"' in sources
