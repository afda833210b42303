#!/usr/bin/env python
"""The time of a process until the first outputs of a model, and until its first gradients.

Each process builds a model with the package's convolutions (or PyTorch's), puts it and a batch on
the GPU, and is timed from there: nothing has run yet, libraries are not loaded, plans not built.
The modes take turns: `heuristic`; `auto` with an empty store, and with the store of such a process;
`tune` and then a step; the backend of torch.compile with an empty store and with a filled one, each
with Inductor's caches in it; PyTorch with benchmark off and on. With `--kernels found` all modes
but the backend's find the kernels of run time compiled: a first process, which is not timed, has
run them all. With `none` every process compiles its own. An empty store lacks the package's kept
plans and kernels, too.

    python benchmarks/warm_start --json warm_start.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments
from common.record import Record

from warm_start.modes import DEFAULT, MODES, REFERENCE, WARM_UP, plan


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--size", type=int, default=224, help="of the square images")
    p.add_argument("--modes", default=",".join(DEFAULT), help="of: " + ",".join(MODES))
    p.add_argument("--inference", action="store_true", help="in eval mode, without gradients")
    p.add_argument("--kernels", choices=("found", "none"), default="found", help="see above")
    p.add_argument("--runs", type=int, default=3, help="processes of each mode")
    p.add_argument("--time-limit", type=float, default=560, help="seconds for all")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def checked(options: argparse.Namespace) -> list[str]:
    """The modes."""
    modes = arguments.some_of("--modes", options.modes, MODES)
    for mode in modes:
        if (filler := MODES[mode].store) in MODES and filler not in modes:
            sys.exit(f"--modes: {mode} needs {filler}, which fills its store")
    if REFERENCE not in modes:
        sys.exit(f"--modes must have {REFERENCE}, which the others are compared with")
    arguments.check_least(options, batch=1, size=1, runs=1)
    return modes


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve

        from warm_start import measure

        return serve(measure.warm_up if options.worker == WARM_UP else measure.measure)
    modes = checked(options)

    from common.workers import records_of, start

    from cudnn_autotune.tools.processes import started_ahead
    from warm_start.report import tables

    begin = time.monotonic()
    record = Record("warm_start", options)
    processes, failures = record.list_of("processes"), record.list_of("failures")
    is_dry_run, finds_kernels = options.device == "cpu", options.kernels == "found"
    request = {
        "device": options.device,
        "model": options.model,
        "modes": modes,
        "inference": options.inference,
        "shape": [2, 3, 16, 16] if is_dry_run else [options.batch, 3, options.size, options.size],
    }
    runs = plan(modes, options.runs)
    names = [WARM_UP, *runs]
    filled: dict[str, str | None] = {}  # the latest store of each mode
    # All import torch while the first one runs, which is not timed: none may do so beside another.
    ahead = 1 if is_dry_run else len(names)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text, record:
        folder = Path(text)
        # The driver keeps the kernels that it compiles at run time in this folder.
        compiled = {"CUDA_CACHE_PATH": str(folder / "compiled")} if finds_kernels else None
        workers = started_ahead(names, partial(start, __file__, environment=compiled), ahead)
        for index, worker in enumerate(workers):
            left = options.time_limit - (time.monotonic() - begin)
            if left < 5:
                rest = len(names) - index
                failures.append(f"time limit: {rest} of {len(names)} processes were not run")
                break
            mode = runs.get(worker.name, "")
            wanted = MODES[mode].store if mode else "off"
            store = str(folder / worker.name) if wanted == "empty" else filled.get(wanted)
            if wanted in MODES and store is None:
                failures.append(f"{worker.name}: no store was filled for it")
                continue
            mine = {**request, "store": store, "mode": mode}
            if not mode and not finds_kernels:
                mine["modes"] = [REFERENCE]  # libraries are read from the disk
            for entry in records_of(worker, mine, left, failures):
                if not mode:
                    record.results["warm_up"] = entry
                    continue
                processes.append({"mode": mode, **entry})
                filled[mode] = store
                record.save()
    return record.end(len(processes) == len(runs), tables)


if __name__ == "__main__":
    sys.exit(main())
