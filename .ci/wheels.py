#!/usr/bin/env python3
"""Builds a wheel for each release of torch, and tries each in a fresh environment.

    python .ci/wheels.py                          # torch 2.11 to 2.15
    python .ci/wheels.py 2.13.0+cpu 2.14.1        # these

A wheel fits one minor release of torch, by its C++ ABI, and the version of Python that runs this
script. Wheels of two releases of torch have one name, so each is written into a folder of its own,
such as dist/torch-2.14. It is then installed into an environment without torch, which must get the
release that it was built for, imported there, and called. Environments are removed at once: one
with CUDA takes 5 GB. Standard error tells what begins, with the time of day.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
# torch itself imports the package here, in the middle of its own import.
TRIED = """
import os
os.environ["CUDNN_AUTOTUNE_ENABLE"] = "1"
import torch
import sys
cudnn_autotune = sys.modules["cudnn_autotune"]
layer = cudnn_autotune.Conv2d(3, 8, 3)
plain = torch.nn.Conv2d(3, 8, 3)
plain.load_state_dict(layer.state_dict())
images = torch.randn(2, 3, 16, 16)
assert torch.equal(layer(images), plain(images))
print(torch.__version__)
"""


def tell(text: str) -> None:
    """Says on standard error what begins now, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def fresh(folder: Path) -> list[str]:
    """Makes an environment; returns the command of its interpreter."""
    venv.create(folder, with_pip=True)
    return [str(folder / "bin" / "python")]


def run(command: list[str]) -> str:
    """Runs a command in an empty folder, where no checkout hides what is installed."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            command, cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}")
    return done.stdout


def build(release: str, into: Path) -> Path:
    """Builds a wheel against a release of torch, which the build finds in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        tell(f"torch {release}: an environment with it, to build in")
        python = fresh(Path(folder))
        exact = release if release.count(".") > 1 else f"{release}.*"
        run([*python, "-m", "pip", "install", "--quiet", f"torch=={exact}", "numpy"])
        into.mkdir(parents=True, exist_ok=True)
        for old in into.glob("*.whl"):
            old.unlink()
        tell(f"torch {release}: compiling, which takes minutes")
        run([*python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(into), str(ROOT)])
    (wheel,) = into.glob("*.whl")
    return wheel


def try_out(wheel: Path, release: str) -> str:
    """Installs a wheel into a fresh environment and calls a layer; returns the version of torch."""
    with tempfile.TemporaryDirectory() as folder:
        tell(f"torch {release}: trying {wheel.name} in an empty environment")
        python = fresh(Path(folder))
        # The wheel's metadata cannot name a build such as +cpu.
        wanted = [f"torch=={release}"] if "+" in release else []
        run([*python, "-m", "pip", "install", "--quiet", str(wheel), *wanted])
        found = run([*python, "-c", TRIED]).split()[-1]
    if not found.startswith(release):
        raise RuntimeError(f"{wheel} was built for torch {release}, and brought {found}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, help="of torch: 2.14, 2.13.0+cpu")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    failed = 0
    for release in options.releases:
        minor = ".".join(release.split(".")[:2])
        begin_s = time.monotonic()
        try:
            wheel = build(release, options.into.resolve() / f"torch-{minor}")
            text = f"works with torch {try_out(wheel, release)}: {wheel}"
        except RuntimeError as error:
            failed += 1
            text = f"failed: {error}"
        print(f"torch {release} ({time.monotonic() - begin_s:.0f} s): {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
