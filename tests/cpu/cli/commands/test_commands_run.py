"""``cudnn-autotune run`` runs a script as Python does, and says at the end what was tuned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from support.processes.subprocesses import PACKAGE_PARENT, python, python_forked
from support.store.decisions import decision, selection, timed

import cudnn_autotune_cli
from cudnn_autotune.engines.selection import Evidence
from cudnn_autotune.models.process_summary import summary
from cudnn_autotune.norms.measuring import NormChoice
from cudnn_autotune.tuning.choice import Choice

NOTHING = "cudnn-autotune: nothing was tuned: no convolution ran on a GPU"


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


# Observations of a script's run, by Python and by this package

PROBE = """
import atexit, json, os, pickle, sys, threading, time, traceback, warnings

class Pickled:
    pass

def pickled(where):
    pickle.loads(pickle.dumps(Pickled()))
    print(where, sys.modules["__main__"] is main, flush=True)

def late():
    time.sleep(0.3)
    pickled("thread")

def names():
    found = {n: repr(v).partition(" at 0x")[0] for n, v in globals().items() if n[:2] == "__"}
    # Python compiles a script that is imported a second time into a file.
    return {n: v for n, v in found.items() if n not in ("__builtins__", "__annotations__")}

def depth():
    return [os.path.basename(f.filename) for f in traceback.extract_stack()]

before, filters = names(), repr(warnings.filters)
here = os.getcwd()
main = sys.modules["__main__"]
atexit.register(pickled, "first")
if "_CUDNN_AUTOTUNE_RUN" in os.environ:  # Python's own run needs none of it, and is quick without
    import torch
atexit.register(pickled, "last")
os.chdir("/")
facts = {
    "names": before,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "xoptions": sys._xoptions,
    "warnoptions": sys.warnoptions,
    "filters": filters,
    "folder": here,
    "depth": depth(),
    "hooks": [
        hook.__module__ + "." + hook.__name__
        for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook)
    ],
    "streams": [(s.name, s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "input": sys.stdin.read() if "-" in sys.argv[:1] else None,
    "exists": "__file__" in globals() and os.path.exists(os.path.abspath(__file__)),
    "main": __name__,
}
print(json.dumps(facts, default=str, indent=1, sort_keys=True))
warnings.warn("of the script")
threading.Thread(target=late).start()
{ending}
"""
FORMS = {
    "script": ["script.py", "a", "--b", "-m"],
    "script of another folder": ["../folder/script.py"],
    "module": ["-m", "script", "-x", "--help"],
    "package": ["-m", "package", "a"],
    "module of a package": ["-m", "package.part"],
    "folder": ["package", "--", "a"],
    "zip": ["archive.zip", "a"],
    "standard input": ["-", "a"],
    "name with a dash": ["--", "-script.py", "a"],
}
ENDINGS = {
    "excepthook": "sys.excepthook = lambda *a: print('HOOK', a[0].__name__)\nraise ValueError('x')",
    "thread's excepthook": "threading.excepthook = lambda a: print('HOOK', a.exc_type.__name__)\n"
    "threading.Thread(target=lambda: 1 / 0).start()",
    "unraisablehook": "sys.unraisablehook = lambda a: print('HOOK', a.exc_type.__name__)\n"
    "class Bad:\n    def __del__(self): 1 / 0\nBad()",
    "raises": "raise OSError('lost')",
    "raises a group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "syntax": "eval('1 +')",
    "status": "sys.exit(7)",
    "text": "sys.exit('bye')",
    "other status": "raise SystemExit((1, 2))",
    "large status": "sys.exit(300)",
    "at once": "sys.stdout.flush(); os._exit(5)",
    "Ctrl-C": "os.kill(os.getpid(), 2); time.sleep(9)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGTERM": "os.kill(os.getpid(), 15); time.sleep(9)",
    "SIGABRT": "os.abort()",
    "fork": "threading.enumerate()[-1].join()\n"
    "if not os.fork(): sys.exit(3)\nprint(os.wait()[1], flush=True)",
    "no argv": "sys.argv.clear()",
    "argv is no list": "del sys.argv",
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "closed files": "os.close(1); os.close(2)",
    "no streams": "sys.stdout = sys.stderr = None",
    "own stream": "import io; sys.stderr = io.StringIO()",
    "own output in atexit": "atexit.register(lambda: sys.stderr.write('said\\n'))",
    "main replaced": "import types; sys.modules['__main__'] = types.ModuleType('__main__')",
    "main deleted": "del sys.modules['__main__']",
}


@pytest.fixture
def probes(folder: Path) -> Path:
    (folder / "folder").mkdir()
    package = folder / "folder" / "package"
    package.mkdir()
    probe = PROBE.replace("{ending}", "")
    (package / "__init__.py").write_text("")
    for file in ("package/__main__.py", "package/part.py", "script.py", "-script.py"):
        (folder / "folder" / file).write_text(probe)
    with zipfile.ZipFile(folder / "folder" / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", probe)
    return folder / "folder"


def both(
    *arguments: str,
    cwd: Path,
    options: Sequence[str] = (),
    input: str = "",
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[subprocess.CompletedProcess[str]]:
    """Returns the outcome by Python, and by the command with its summary removed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_AUTOTUNE_")}
    clean |= {"PYTHONPATH": PACKAGE_PARENT, "CUDNN_AUTOTUNE_CACHE": "off", **env}
    found = []
    for command in ([], ["-m", "cudnn_autotune_cli", "run"]):
        done = subprocess.run(
            [sys.executable, *options, *command, *arguments],
            **{"env": clean, "cwd": cwd, "input": input},
            **{"capture_output": True, "text": True, "timeout": 300},
        )
        done.stderr = re.sub("0x[0-9a-f]+", "0x", done.stderr)
        found.append(done)
    found[1].stderr, said = re.subn(r"(?m)^cudnn-autotune: .*\n", "", found[1].stderr)
    assert said <= 1
    return found


@pytest.mark.basic(3)
@pytest.mark.parametrize("form", FORMS)
def test_whatever_a_script_sees_is_as_by_python(probes: Path, form: str) -> None:
    source = PROBE.replace("{ending}", "") if form == "standard input" else ""
    plain, tuned = both(*FORMS[form], cwd=probes, input=source)
    assert plain.returncode == 0, plain.stderr
    assert (tuned.stdout, tuned.stderr) == (plain.stdout, plain.stderr)
    assert tuned.returncode == plain.returncode
    assert plain.stdout.endswith("thread True\nlast True\nfirst True\n")


@pytest.mark.basic(5)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_by_python(probes: Path, ending: str) -> None:
    (probes / "script.py").write_text(PROBE.replace("{ending}", ENDINGS[ending]))
    plain, tuned = both("script.py", cwd=probes)
    assert tuned.returncode == plain.returncode
    assert tuned.stderr == plain.stderr
    assert tuned.stdout == plain.stdout


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    "options",
    [
        ["-O", "-W", "error::DeprecationWarning", "-X", "dev"],
        ["-PB", "-Xutf8=0", "-u"],
        ["-OO", "--check-hash-based-pycs", "always", "-sWd"],
    ],
    ids=str,
)
def test_options_of_python_itself_hold_for_the_script(probes: Path, options: list[str]) -> None:
    plain, tuned = both("script.py", cwd=probes, options=options)
    assert (tuned.returncode, tuned.stdout) == (0, plain.stdout), tuned.stderr


@pytest.mark.parametrize(
    ("orig_argv", "argv", "options"),
    [
        (["script", "run", "a.py"], ["script", "run", "a.py"], []),
        (["-O", "-Xdev", "script", "run"], ["script", "run"], ["-O", "-Xdev"]),
        (["-X", "dev", "-m", "module", "run", "-W"], ["file", "run", "-W"], ["-X", "dev"]),
        (["-mmodule", "run", "-m", "b"], ["file", "run", "-m", "b"], []),
        (["-OOm", "module", "run"], ["file", "run"], ["-OO"]),
        (["-Immodule", "run"], ["file", "run"], ["-I"]),
        (["-c", "main()", "run"], ["-c", "run"], []),
        (["--embedded", "run"], ["file", "run"], []),
    ],
)
def test_pythons_own_options_are_those_before_the_program(
    monkeypatch: pytest.MonkeyPatch, orig_argv: list[str], argv: list[str], options: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *orig_argv])
    monkeypatch.setattr(sys, "argv", argv)
    assert cudnn_autotune_cli._interpreter_options() == options


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    "arguments",
    [["-m", "no_such_module"], ["-m", "no_such.module"], ["-m", "email"], ["."], ["nope.py"]],
    ids=str,
)
def test_what_cannot_be_run_is_named_as_by_python(folder: Path, arguments: list[str]) -> None:
    plain, tuned = both(*arguments, cwd=folder)
    assert plain.returncode != 0
    assert (tuned.returncode, tuned.stderr) == (plain.returncode, plain.stderr)


STARTS = """
import multiprocessing, os, subprocess, sys, torch
code = "import sys, torch; print('cudnn_autotune' in sys.modules, flush=True)"

def is_enabled():
    ca = sys.modules.get("cudnn_autotune")
    print(ca is not None and ca._C.exchange_process_wide(None) is not None, flush=True)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=is_enabled)
        process.start()
        process.join()
    subprocess.run([sys.executable, "-c", code])
    is_enabled()
"""


@pytest.mark.parametrize("value", ["", "1"])
def test_processes_that_a_script_starts_are_served_where_the_variable_asks(
    tmp_path: Path, value: str
) -> None:
    """A forked process has the state of its parent."""
    (tmp_path / "script.py").write_text(STARTS)
    env = {"CUDNN_AUTOTUNE_ENABLE": value}
    done = python("-m", "cudnn_autotune_cli", "run", "script.py", cwd=tmp_path, env=env)
    served = str(value == "1")
    assert done.stdout.split() == ["True", served, served, served, "True"], done.stderr
    assert done.stderr == f"{NOTHING}\n"


def test_a_script_without_torch_is_pythons_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    done = python("-m", "cudnn_autotune_cli", "run", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cudnn_autotune_cli", "run", "script.py"]
    env = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    done = subprocess.run(command, stderr=writing, cwd=tmp_path, env=env, timeout=300)
    os.close(writing)
    assert done.returncode == 0


def test_a_mode_is_checked_before_the_script_runs(folder: Path) -> None:
    done = ran("--sampling", "rce", "script.py", cwd=folder)
    assert done.returncode == 2
    assert "Invalid value for '--sampling': 'rce' is not one of" in " ".join(done.stderr.split())
    assert "race" in done.stderr
    assert done.stdout == ""


def test_where_torch_calls_no_entry_point_run_says_so(folder: Path) -> None:
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = python("-m", "cudnn_autotune_cli", "run", "script.py", cwd=folder, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD to be 1 or not set, got '0'" in done.stderr


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
