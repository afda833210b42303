"""The recipes of docs/which.md, each with the real package, on the CPU.

There nothing is tuned. So what is shown is that a recipe's model, its conversion, wrapping, saving
and trainer work, and that its numbers are those of the same program without this package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import snippets
from stored import H200, decisions, fill, succeeded
from subprocesses import python
from torch.utils._pytree import tree_leaves

from cudnn_autotune.store import Store

PAGE = "docs/which.md"
# Module that a recipe imports -> its name for pip, by recipe.
PACKAGES = {
    "timm": {"timm": "timm"},
    "torchvision detection": {"torchvision": "torchvision"},
    "Ultralytics": {"ultralytics": "ultralytics"},
    "diffusers": {"diffusers": "diffusers"},
    "transformers (audio)": {"transformers": "transformers"},
    "MONAI": {"monai": "monai"},
    "segmentation_models_pytorch": {"segmentation_models_pytorch": "segmentation-models-pytorch"},
    "Lightning": {"lightning": "lightning"},
    "Accelerate": {"accelerate": "accelerate"},
    "Hugging Face Trainer": {"transformers": "transformers", "accelerate": "accelerate"},
    "DDP": {},
    "FSDP2": {},
}
NOTEBOOK = {"nbclient": "nbclient", "ipykernel": "ipykernel", "ipywidgets": "ipywidgets"}
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
    torch.save({"found": found, "served": sum(served), "tuned": tuned}, sys.argv[1])
"""
SEED = "import torch; torch.manual_seed(0)\n"


@pytest.fixture
def provided(tmp_path: Path) -> Callable[[dict[str, str]], dict[str, str]]:
    """Returns the environment variables with which the packages can be imported. Those that are not
    here, and what they need beside what is, are installed into a temporary folder."""

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "pip", "install", "--quiet", *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def provided(packages: dict[str, str]) -> dict[str, str]:
        missing = [packages[name] for name in packages if importlib.util.find_spec(name) is None]
        if not missing:
            return {}
        here = tmp_path / "here.txt"
        versions = {found.metadata["Name"]: found.version for found in metadata.distributions()}
        versions.pop("cudnn-autotune", None)
        here.write_text("".join(f"{name}=={of}\n" for name, of in versions.items()))
        # Told first and then installed without dependencies: pip would remove from this environment
        # what it replaces.
        plan, folder = tmp_path / "plan.json", tmp_path / "packages"
        constraint = ("--constraint", str(here))
        done = pip("--dry-run", "--report", str(plan), *constraint, *missing)
        if not done.returncode:
            new = [one["metadata"] for one in json.loads(plan.read_text())["install"]]
            pinned = [f"{one['name']}=={one['version']}" for one in new]
            done = pip("--no-deps", "--target", str(folder), *pinned)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
            reason = (errors or ["no error is named"])[-1]
            pytest.skip(f"pip cannot install {' '.join(missing)}: {reason}")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

    return provided


def run(snippet: str, folder: Path, ranks: int, environment: dict[str, str]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "recipe.py").write_text(SEED + snippet + ENDING)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = python(
        *(launcher if ranks > 1 else ()),
        *("recipe.py", "numbers.pt"),
        cwd=folder,
        env={**environment, "YOLO_CONFIG_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    numbers: dict[str, Any] = torch.load(folder / "numbers.pt", weights_only=False)
    return numbers


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
    ranks = RANKS.get(name, 1)
    ours = run(text, tmp_path / "ours", ranks, environment)
    theirs = run(plain, tmp_path / "plain", ranks, environment)
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
