"""What the sdist and the wheel hold, and what a type checker reads of the installed package."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from support import checkout
from support.processes.subprocesses import python

ROOT = checkout.ROOT


def in_git() -> list[str]:
    """The files that git has, without those that are deleted here."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout")
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [file for file in done.stdout.split("\0") if file and (ROOT / file).exists()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, in which nothing is built."""
    pytest.importorskip("setuptools", "61")
    folder = tmp_path_factory.mktemp("checkout")
    for file in in_git():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def purelib(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel holds beside the compiled part."""
    folder = tmp_path_factory.mktemp("purelib")
    code = (
        "import sys, setuptools\n"
        "setuptools._install_setup_requires = lambda attrs: None  # as pip's build does\n"
        f"sys.argv = ['setup.py', '-q', 'build_py', '--build-lib', {str(folder)!r}]\n"
        "sys.path.insert(0, '')\n"
        "__file__ = 'setup.py'\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    )
    done = python("-c", code, cwd=checkout)
    assert done.returncode == 0, done.stderr
    return folder


def backend(call: str, folder: Path) -> None:
    """Calls the build's backend in a folder, as pip and `python -m build` do."""
    done = python("-c", f"from setuptools import build_meta; build_meta.{call}", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an sdist is unpacked into."""
    packed, unpacked = (tmp_path_factory.mktemp(name) for name in ("packed", "unpacked"))
    backend(f"build_sdist({str(packed)!r})", checkout)
    (archive,) = packed.iterdir()
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return folder


@pytest.mark.slow
def test_the_sdist_is_complete(sdist: Path) -> None:
    """The build, the tests and the documentation find in it what they find in the checkout."""
    files = [path for path in sdist.rglob("*") if path.is_file()]
    names = {path.relative_to(sdist).as_posix() for path in files}
    assert set(in_git()) - names == set()
    differ = [
        name for name in in_git() if (sdist / name).read_bytes() != (ROOT / name).read_bytes()
    ]
    assert differ == []
    written = {"PKG-INFO", "setup.cfg"}
    others = names - set(in_git()) - written
    assert all(name.startswith("cudnn_autotune.egg-info/") for name in others), others


@pytest.mark.slow
def test_a_wheel_of_the_sdist_says_what_it_is(sdist: Path, tmp_path: Path) -> None:
    """Its metadata, without compiling anything."""
    backend(f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", sdist)
    (folder,) = tmp_path.glob("*.dist-info")
    found = email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert found["Version"] == project["version"]
    assert found["Requires-Python"] == project["requires-python"]
    assert found["License"] == "Apache-2.0"
    assert sorted(found.get_all("Classifier", [])) == sorted(project["classifiers"])
    assert "Typing :: Typed" in project["classifiers"]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"torch=={minor}.*" in found.get_all("Requires-Dist", [])
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    scripts = (folder / "entry_points.txt").read_text(encoding="utf-8")
    assert "cudnn-autotune = cudnn_autotune_cli:main" in scripts


@pytest.mark.slow
def test_the_wheel_has_what_the_package_has(purelib: Path) -> None:
    expected = {file for file in in_git() if re.match(r"cudnn_autotune(/|_\w+\.py)", file)}
    assert {"cudnn_autotune/py.typed", "cudnn_autotune_autoload.py"} <= expected
    assert expected <= {path.relative_to(purelib).as_posix() for path in purelib.rglob("*")}


def test_the_build_takes_the_setuptools_of_any_environment() -> None:
    """``python -m build --no-isolation`` refuses an environment without what is named here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    required = map(Requirement, project["build-system"]["requires"])
    (setuptools,) = (one for one in required if one.name == "setuptools")
    # The version in Python 3.11's virtual environments, and those without pkg_resources.
    for version in ("65.5.0", "82.0.0", "84.2.1"):
        assert setuptools.specifier.contains(version)


USER = """
import cudnn_autotune as ca

conv = ca.Conv2d(3, 8, 3, sampling="race", workspace_limit=1 << 20)
ca.Conv2d(3, 8, 3, sampling=3)  # wrong: sampling
ca.set_sampling("a registered mode")
ca.set_new_shapes("tune")
ca.set_new_shapes("nearest")  # wrong: set_new_shapes
with ca.flags("auto", budget_ms=None, new_shapes="online"):
    ca.set_store(mode="read")
    ca.set_store(mode="write")  # wrong: mode
ca.convert(conv, memory_format="auto")
problem = ca.ConvProblem("fprop", (1, 3, 8, 8), (8, 3, 3, 3), padding="same", activation="relu")
ca.ConvProblem("forward", (1, 3, 8, 8), (8, 3, 3, 3))  # wrong: ConvProblem
ca.ConvProblem("fprop", (1, 3, 8, 8), (8, 3, 3, 3), padding="full")  # wrong: padding
ca.ConvProblem("fprop", (1, 3, 8, 8), (8, 3, 3, 3), activation="leaky_relu(0.1)")
ca.ConvProblem("fprop", (1, 3, 8, 8), (8, 3, 3, 3), activation=None)  # wrong: activation
ca.expert.measure(problem, ["aten"], cache="warm")  # wrong: cache
times: dict[str, list[float]] = ca.expert.measure(problem, ["aten"])
mode: int = ca.get_new_shapes()  # wrong: Literal
"""


@pytest.mark.slow
def test_a_users_program_is_checked(purelib: Path, tmp_path: Path) -> None:
    """By mypy, which reads an installed package only if it has a py.typed."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    shutil.copytree(purelib / "cudnn_autotune", site / "cudnn_autotune")
    program = tmp_path / "program.py"
    program.write_text(USER)
    wrong = {
        number: line.split("# wrong: ")[1]
        for number, line in enumerate(USER.splitlines(), 1)
        if "# wrong: " in line
    }
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--python-executable", interpreter, "--strict"),
            # torch is not in that environment; its part of a signature is not looked at.
            *("--ignore-missing-imports", "--allow-subclassing-any", "--no-incremental"),
            *("--config-file", "", "--no-error-summary", "program.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        match = re.match(r"program\.py:(\d+): (error|note): (.*)", line)
        assert match, line
        if match[2] == "error":
            found[int(match[1])] = match[3]
    assert found.keys() == wrong.keys(), done.stdout
    for number, named in wrong.items():
        assert named in found[number]
