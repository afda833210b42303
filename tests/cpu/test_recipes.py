"""The recipes of docs/how-to/recipes.md, each with the real package, on the CPU.

There nothing is tuned. So what is shown is that a recipe's model, its conversion, wrapping, saving
and trainer work, and that its numbers are those of the same program without this package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.documents import snippets
from support.processes.subprocesses import python
from support.store.stored import H200, decisions, fill, succeeded
from torch.utils._pytree import tree_leaves

from cudnn_autotune.store.file_store import Store

PAGE = "docs/how-to/recipes.md"
TRANSFORMERS = {"transformers": "transformers>=4.50"}
ACCELERATE = {"accelerate": "accelerate>=1.1"}
# Module that a recipe imports -> its requirement for pip, by recipe. Without a least version pip
# may choose a release that lacks what the recipe imports.
PACKAGES = {
    "timm": {"timm": "timm>=1.0"},
    "torchvision detection": {"torchvision": "torchvision"},
    "Ultralytics": {"ultralytics": "ultralytics>=8.3"},
    "diffusers": {"diffusers": "diffusers>=0.32"},
    "transformers (audio)": TRANSFORMERS,
    "MONAI": {"monai": "monai>=1.4"},
    "segmentation_models_pytorch": {
        "segmentation_models_pytorch": "segmentation-models-pytorch>=0.4"
    },
    "Lightning": {"lightning": "lightning>=2.4"},
    "Accelerate": ACCELERATE,
    "Hugging Face Trainer": TRANSFORMERS | ACCELERATE,
    "DDP": {},
    "FSDP2": {},
}
NOTEBOOK = {"nbclient": "nbclient", "ipykernel": "ipykernel", "ipywidgets": "ipywidgets"}
INSTALL_TIMEOUT_S = 240.0  # pip may try a hundred releases of a package, for an hour
RANKS = {"DDP": 2, "FSDP2": 2}
RECIPES = {snippet.heading: snippet for snippet in snippets(PAGE) if snippet.language == "python"}

# Ends a recipe: writes its numbers, and how many convolutions are served.
ENDING = """
import os, sys, torch
if os.environ.get("RANK", "0") == "0":
    found = {name: globals()[name] for name in ("outputs", "losses") if name in globals()}
    models = [value for value in globals().values() if isinstance(value, torch.nn.Module)]
    package = sys.modules.get("cudnn_autotune")
    served = [len(package.conversion(model).served) for model in models] if package else []
    tuned = len(package.choices()) if package else 0
    torch.save({"found": found, "served": sum(served), "tuned": tuned}, "numbers.pt")
# The threads of a group that is left open may abort the process while it exits.
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
SEED = "import torch; torch.manual_seed(0)\n"


def absent(packages: dict[str, str]) -> dict[str, str]:
    return {name: of for name, of in packages.items() if importlib.util.find_spec(name) is None}


def install(packages: Iterable[str], folder: Path) -> str:
    """Installs packages, and what they need beside what is here, into a folder. Returns what pip
    complains of, and leaves the folder empty then."""

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "pip", "install", "--quiet", *arguments)
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            error = f"ERROR: pip has not ended after {INSTALL_TIMEOUT_S:.0f} s"
            return subprocess.CompletedProcess(command, 1, "", error)

    folder.mkdir()
    here, plan = folder.with_suffix(".txt"), folder.with_suffix(".json")
    versions = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    versions.pop("cudnn-autotune", None)
    here.write_text("".join(f"{name}=={of}\n" for name, of in versions.items()))
    # Told first and then installed without dependencies: pip would remove from this environment
    # what it replaces.
    done = pip("--dry-run", "--report", str(plan), "--constraint", str(here), *packages)
    if not done.returncode:
        new = [one["metadata"] for one in json.loads(plan.read_text())["install"]]
        pinned = [f"{one['name']}=={one['version']}" for one in new]
        # Most of their files are never imported.
        done = pip("--no-deps", "--no-compile", "--target", str(folder), *pinned)
    if not done.returncode:
        return ""
    shutil.rmtree(folder)  # a pip that was ended may have left a part of the packages
    folder.mkdir()
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
    return (errors or ["no error is named"])[-1]


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of all recipes, which the first process that asks installs; empty
    if they cannot be installed together."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            every = {name: of for recipe in PACKAGES.values() for name, of in recipe.items()}
            install(absent(every | NOTEBOOK).values(), folder)
    return folder


@pytest.fixture
def provided(together: Path, tmp_path: Path) -> Callable[[dict[str, str]], dict[str, str]]:
    """Returns the environment variables with which the packages can be imported."""

    def provided(packages: dict[str, str]) -> dict[str, str]:
        missing = absent(packages)
        folder = together
        if not all(PathFinder.find_spec(name, [str(folder)]) for name in missing):
            folder = tmp_path / "packages"
            if error := install(missing.values(), folder):
                pytest.skip(f"pip cannot install {' '.join(missing.values())}: {error}")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])} if missing else {}

    return provided


# Runs programs one after the other, each in a folder and a process of its own, with one import of
# what all of them import.
FORKS = """
import os, runpy, sys
IMPORTS
for name in sys.argv[1:]:
    if child := os.fork():
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"{name} ended with {status}")
    else:
        os.chdir(name)
        runpy.run_path("recipe.py", run_name="__main__")
        break
"""


def run(
    snippets: dict[str, str], folder: Path, ranks: int, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Runs snippets by name, and returns the numbers of each."""
    for name, snippet in snippets.items():
        (folder / name).mkdir()
        (folder / name / "recipe.py").write_text(SEED + snippet + ENDING)
    lines = [set(snippet.splitlines()) for snippet in snippets.values()]
    common = [
        line
        for line in next(iter(snippets.values())).splitlines()
        if line.startswith(("import ", "from ")) and all(line in some for some in lines)
    ]
    (folder / "forks.py").write_text(FORKS.replace("IMPORTS", "\n".join(common)))
    variables = {**environment, "YOLO_CONFIG_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    # Packages ask whether there is a GPU as they are imported: without CUDA, which a fork loses.
    variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    # A launcher's store keeps the addresses of the program before, so it serves one.
    for names in [[name] for name in snippets] if ranks > 1 else [list(snippets)]:
        command = (*(launcher if ranks > 1 else ()), "forks.py", *names)
        done = python(*command, cwd=folder, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / name / "numbers.pt", weights_only=False) for name in snippets]


def assert_same(ours: Any, theirs: Any) -> None:
    pairs = list(zip(tree_leaves(ours), tree_leaves(theirs), strict=True))
    assert pairs
    for one, other in pairs:
        one, other = torch.as_tensor(one).detach().cpu(), torch.as_tensor(other).detach().cpu()
        if torch.cuda.is_available():
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
        else:
            assert one.isfinite().all()
            assert torch.equal(one, other)


def test_every_recipe_is_run() -> None:
    assert RECIPES.keys() == {*PACKAGES, "A notebook", "Docker"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_recipe_is_its_program_without_this_package(
    name: str, provided: Callable[[dict[str, str]], dict[str, str]], tmp_path: Path
) -> None:
    text = RECIPES[name].text
    added = [line for line in text.splitlines() if "cudnn_autotune" in line]
    plain = "".join(f"{line}\n" for line in text.splitlines() if line not in added)
    environment = provided(PACKAGES[name])
    programs = {"plain": plain, "ours": text}
    theirs, ours = run(programs, tmp_path, RANKS.get(name, 1), environment)
    assert theirs["served"] == theirs["tuned"] == 0
    assert ours["found"].keys() == theirs["found"].keys()
    assert_same(ours["found"], theirs["found"])
    assert (ours["served"] > 0) == any(".convert(" in line for line in added)
    assert (ours["tuned"] > 0) == torch.cuda.is_available()


@pytest.mark.slow
def test_the_notebook(provided: Callable[[dict[str, str]], dict[str, str]], tmp_path: Path) -> None:
    """In a kernel of Jupyter: the cell's last line is shown as a table, and bars are drawn."""
    compared = "cudnn_autotune.compare(model, images, ways=['channels_last'])"
    sources = [RECIPES["A notebook"].text, f"model = cudnn_autotune.revert(model)\n{compared}"]
    program = (
        "import nbclient, nbformat, sys\n"
        f"cells = [nbformat.v4.new_code_cell(source) for source in {sources!r}]\n"
        "notebook = nbformat.v4.new_notebook(cells=cells)\n"
        "nbclient.NotebookClient(notebook, timeout=200).execute()\n"
        "for cell in notebook.cells:\n"
        "    for output in cell.outputs:\n"
        "        print(output.output_type, sorted(output.get('data', [])))"
    )
    environment = provided(NOTEBOOK)
    environment |= {"JUPYTER_PATH": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({**kernel, "display_name": "", "language": ""}))
    done = python("-c", program, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("execute_result ['text/html', 'text/plain']") == 2
    assert "display_data ['application/vnd.jupyter.widget-view+json'" in done.stdout


@pytest.mark.slow
def test_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the Dockerfile that are about this package, as the image's build runs them."""
    dockerfile = next(s.text for s in snippets(PAGE) if s.language == "dockerfile")
    steps = [line.partition(" ")[::2] for line in dockerfile.splitlines()]
    (variable,) = [rest for word, rest in steps if word == "ENV"]
    name, _, store = variable.partition("=")
    (copied,) = [rest.split() for word, rest in steps if word == "COPY" and "json" in rest]
    (imported,) = [rest.split() for word, rest in steps if "import" in rest]
    assert imported[-1] == copied[1]
    shipped, tuned = tmp_path / copied[0], tmp_path / store.lstrip("/")
    succeeded("export", shipped, "--store", fill(tmp_path / "store"))
    monkeypatch.setenv(name, str(tuned))
    assert "6 new" in succeeded(*imported[1:-1], shipped)
    assert {decision.key for decision in Store(tuned, H200)} == {d.key for d in decisions()}
    (command,) = [json.loads(rest) for word, rest in steps if word == "CMD"]
    (tmp_path / "serve.py").write_text("print(6 * 7)")
    assert command[-1].endswith("/serve.py")
    assert python("-m", "cudnn_autotune", *command[1:-1], "serve.py", cwd=tmp_path).stdout == "42\n"
    done = python("-c", RECIPES["Docker"].text, cwd=tmp_path, env={"CUDNN_AUTOTUNE_CACHE": "read"})
    assert done.returncode == 0, done.stderr
