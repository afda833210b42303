"""Ranks of one host, started by torchrun, each launch with nothing to find on the disk."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_LAST_LINES = 40
# torchrun needs some time to end its ranks, which are in sessions of their own.
_ENDING_S = 45.0


class LaunchError(RuntimeError):
    """The launch failed, or ran past its limit and was ended."""


def add_options(p: argparse.ArgumentParser, time_limit_s: float) -> None:
    """Adds what launches of a model have in common, and what :func:`launch` calls the script by."""
    p.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    p.add_argument("--batch", type=int, default=64, help="images of each rank")
    p.add_argument("--size", type=int, default=224, help="height and width of the images")
    p.add_argument("--time-limit", type=float, default=time_limit_s, help="seconds for all")
    p.add_argument("--rank-request", type=Path, help=argparse.SUPPRESS)


def launch(
    script: Path, ranks: int, request: dict[str, Any], limit_s: float
) -> list[dict[str, Any]]:
    """Returns each rank's result, by rank. The ranks have their own store and folder of compiled
    kernels, which are empty.

    Raises:
        LaunchError: with the last lines of what the ranks printed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        request_file = folder / "request.json"
        request_file.write_text(json.dumps(request))
        log = folder / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}"]
        command += [str(script), "--rank-request", str(request_file)]
        environment = {
            **os.environ,
            "CUDA_CACHE_PATH": str(folder / "compiled"),
            "CUDNN_AUTOTUNE_CACHE_DIR": str(folder / "store"),
            "CUDNN_AUTOTUNE_CACHE": "read_write",
        }
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise LaunchError(f"ran past its limit of {limit_s:.0f} s") from None
            finally:
                _end(process)
        files = [folder / f"rank{rank}.json" for rank in range(ranks)]
        if code or not all(file.exists() for file in files):
            lines = log.read_text(errors="replace").splitlines()
            # The first is the cause; those after it are of the launcher.
            reason = next((line for line in lines if "Error: " in line), f"exit code {code}")
            raise LaunchError("\n".join([reason, *lines[-_LAST_LINES:]]))
        return [json.loads(file.read_text()) for file in files]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, and by it its ranks, where it still runs."""
    process.terminate()
    try:
        process.wait(timeout=_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
