"""``cudnn-autotune run`` runs a script as Python does, and says at the end what was tuned."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from decisions import decision, selection, timed
from subprocesses import python, python_forked

from cudnn_autotune.engines.selection import Evidence
from cudnn_autotune.nn.models.process_summary import summary
from cudnn_autotune.nn.norm_measuring import NormChoice
from cudnn_autotune.tuning.choice import Choice

NOTHING = "cudnn-autotune: no convolution was served: none ran on a CUDA device"


def ran(*arguments: str | Path, cwd: Path, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process that has imported torch already, which is quicker."""
    code = f"import os; os.environ['RANK'] = '{rank}'; from cudnn_autotune_cli import main\n"
    return python_forked(f"{code}main({['run', *map(str, arguments)]})", cwd=cwd)


SCRIPT = """
import sys, warnings
import helper
import cudnn_autotune as ca
from cudnn_autotune import _C

class Pickled:
    pass

if __name__ == "__main__":
    import pickle
    pickle.loads(pickle.dumps(Pickled()))
    warnings.warn("a warning of the script", stacklevel=1)
    print(sys.argv[1:], helper.NAME, __file__)
    if "fail" in sys.argv:
        helper.fail()
    sys.exit(7 if "seven" in sys.argv else "bye" if "text" in sys.argv else None)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'helped'\ndef fail():\n    raise OSError('lost')\n")
    return tmp_path


def test_a_script_runs_as_by_python(folder: Path) -> None:
    command = ("-m", "cudnn_autotune_cli", "run", str(folder / "script.py"))
    done = python(*command, "--epochs", "3", "-m", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['--epochs', '3', '-m'] helped {folder / 'script.py'}\n"
    assert "UserWarning: a warning of the script" in done.stderr
    assert done.stderr.splitlines()[-1] == NOTHING


def test_a_module_runs_as_by_python(folder: Path) -> None:
    done = ran("--sampling", "race", "-m", "script", "seven", cwd=folder)
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"['seven'] helped {folder / 'script.py'}\n"


def test_a_script_that_raises_shows_its_traceback_first(folder: Path) -> None:
    done = ran("script.py", "fail", cwd=folder)
    assert done.returncode == 1
    first, *_, last, end = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert first == "Traceback (most recent call last):"
    assert (last, end) == ("OSError: lost", NOTHING)
    assert "helper.py" in done.stderr
    assert "runpy" not in done.stderr


def test_only_the_first_rank_says_what_was_tuned(folder: Path) -> None:
    done = ran("script.py", cwd=folder, rank=1)
    assert done.returncode == 0
    assert "cudnn-autotune:" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-m", "no_such_module"], "no_such_module"),
        (["-m", "no_such.module"], "no_such"),
        (["-m", "email"], "email"),
        (["."], "__main__"),
    ],
)
def test_what_cannot_be_run_is_named_without_a_traceback(
    folder: Path, arguments: list[str], named: str
) -> None:
    done = ran(*arguments, cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "Invalid value for 'SCRIPT': " in said
    assert named in said


def test_the_summary_says_what_is_gained() -> None:
    fast, slow = timed("eng1", 2.0), timed("aten", 3.0)
    evidence = Evidence(rule="fastest")
    one = Choice(decision(selection=selection((fast, slow), evidence)), 0, tuning_ms=1500.0)
    other = replace(one, decision=decision(selection=selection((fast,), evidence)), origin="store")
    assert summary([one, other], {"a tensor without elements": 2}, []) == [
        "2 convolutions served, 1 of them tuned in this run (1.5 s), 1 known from the store",
        "3.000 -> 2.000 ms for one call of 1 convolution (1.50x); 1 more not counted, since "
        "PyTorch's time is not known",
        "2 calls left to PyTorch, mostly: a tensor without elements",
    ]
    assert summary([other], {}, []) == [
        "1 convolution served, 1 known from the store",
        "gain over PyTorch not known, since its time was not measured",
    ]
    served = NormChoice("kept", {"pytorch": 3.0, "kept": 1.0})
    stored = NormChoice("kept", source="store")
    pytorchs = NormChoice("pytorch", {"pytorch": 1.0, "kept": 2.0})
    assert summary([], {}, [served, stored, pytorchs])[1:] == [
        "2 of 3 norms served, 3.000 -> 1.000 ms for one call of 1 (3.00x)"
    ]
    assert summary([], {}, [stored])[1:] == ["1 of 1 norm served"]
