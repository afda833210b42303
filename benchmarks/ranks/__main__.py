#!/usr/bin/env python
"""Tuning a model on several GPUs of one host: how much faster, and do all ranks choose alike?

`cudnn_autotune.distributed.tune` on ResNet-50, forward and backward, under torchrun, in turns on 1,
2 and 4 GPUs. Each launch finds an empty store, and nothing compiled. Its time is that of the call,
from a barrier until the last rank has its table. Then each rank runs a step of the model and tells
a hash of the decisions that it got and one of the engines that serve the step: they must be equal
on all ranks, and nothing may be tuned again.

    python benchmarks/ranks --json ranks.json
    python benchmarks/ranks --gpus 4 --modes race --runs 20 --json ranks_agree.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments, numbers
from common.record import Record

from ranks.launch import LaunchError, add_options, launch

MODES = ("auto", "race", "sustained")
WARM_UP = "warm-up"


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument("--gpus", type=arguments.counts, default="1,2,4", help="ranks: %(default)s")
    p.add_argument("--modes", default="auto,race", help="%(default)s; of: " + ",".join(MODES))
    p.add_argument("--runs", type=int, default=1, help="launches of each mode and number of GPUs")
    p.add_argument("--timeout", type=float, default=120, help="seconds that a rank may be silent")
    add_options(p, time_limit_s=560)
    return p


def checked(options: argparse.Namespace) -> list[str]:
    """The modes."""
    modes = arguments.some_of("--modes", options.modes, MODES)
    arguments.check_least(options, runs=1, batch=1, size=1)
    if not options.timeout > 0:
        sys.exit(f"--timeout must be above 0, got {options.timeout}")
    arguments.check_gpu(__file__)
    import torch

    here = torch.cuda.device_count()
    if options.gpus[-1] > here:
        sys.exit(f"--gpus: {options.gpus[-1]} GPUs asked for, {here} here")
    return modes


def plan(modes: list[str], gpus: list[int], runs: int) -> list[tuple[int, str, int]]:
    """(run, mode, GPUs): round by round, every other round backwards."""
    once = [(mode, count) for mode in modes for count in gpus]
    return [(i, *pair) for i in range(runs) for pair in (once if i % 2 == 0 else once[::-1])]


def main() -> int:
    options = parser().parse_args()
    if options.rank_request:
        from ranks.rank import work

        work(options.rank_request)
        return 0
    modes = checked(options)

    from ranks.report import tables

    begin = time.monotonic()
    record = Record("ranks", options)
    launches, failures = record.list_of("launches"), record.list_of("failures")
    request = {
        "model": options.model,
        "shape": [options.batch, 3, options.size, options.size],
        "timeout_s": options.timeout,
    }
    planned = plan(modes, options.gpus, options.runs)
    # The first launch of all loads libraries from the disk, which is no rank's work: not recorded.
    todo = [(WARM_UP, "race", options.gpus[-1]), *planned]
    with record:
        for index, (run, mode, gpus) in enumerate(todo):
            name = f"{run}: {mode} on {gpus}"
            left = options.time_limit - (time.monotonic() - begin)
            if left < 5:
                rest = len(todo) - index
                failures.append(f"time limit: {rest} of {len(todo)} launches were not run")
                break
            start = time.monotonic()
            try:
                ranks = launch(Path(__file__).resolve(), gpus, {**request, "mode": mode}, left)
            except LaunchError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failures.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            finally:
                took = time.monotonic() - start
                print(f"{name}: {took:.1f} s with its start", file=sys.stderr, flush=True)
            if run == WARM_UP:
                continue
            for rank in ranks:
                rank |= {key: numbers.significant(rank[key], 5) for key in ("seconds", "busy_s")}
            launches.append({"run": run, "mode": mode, "gpus": gpus, "ranks": ranks})
            record.save()
    return record.end(len(launches) == len(planned), tables)


if __name__ == "__main__":
    sys.exit(main())
