#!/usr/bin/env python
"""Batch norms beside communication: is a step among ranks slower by this package's norms?

A step of ResNet-50 (forward, backward and the reduction of gradients) in bfloat16 autocast,
channels_last, under torchrun: by DistributedDataParallel, around a compiled model or compiled with
it, by FSDP2, and as a pipeline of two stages. In each the convolutions are the same, and the batch
norms are PyTorch's, this package's as they are chosen, and this package's in two passes. All of a
launch take turns in the same processes. A step's time is that of the slowest rank. With --soak the
chosen norms run that many steps more, which must end. With --synchronised they are
torch.nn.SyncBatchNorm, which only eager and convert tell apart.

    python benchmarks/ddp_norms --json ddp_norms.json
    python benchmarks/ddp_norms --synchronised --wrappers ddp --buckets 25 \
        --ways "eager,convert: PyTorch's,convert: chosen" --json ddp_norms_synchronised.json
    python benchmarks/ddp_norms --wrappers ddp --buckets 8 --soak 2000 --json ddp_norms_soak.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments
from common.record import Record
from ranks.launch import LaunchError, add_options, launch

from ddp_norms.ways import WAYS, WRAPPERS


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--gpus", type=int, default=2, help="ranks (%(default)s)")
    p.add_argument("--wrappers", default=",".join(WRAPPERS), help="of: %(default)s")
    p.add_argument("--ways", default=",".join(WAYS), help="of: %(default)s")
    p.add_argument("--synchronised", action="store_true", help="norms are synchronised by ranks")
    p.add_argument("--buckets", type=arguments.counts, default="8,25", help="MB, for ddp")
    p.add_argument("--rounds", type=int, default=6, help="turns of each way")
    p.add_argument("--steps", type=int, default=5, help="steps of a turn")
    p.add_argument("--soak", type=int, default=0, help="steps by the chosen norms afterwards")
    add_options(p, time_limit_s=500)
    return p


def main() -> int:
    options = parser().parse_args()
    if options.rank_request:
        from ddp_norms.rank import work

        work(options.rank_request)
        return 0
    wrappers = arguments.some_of("--wrappers", options.wrappers, WRAPPERS)
    ways = arguments.some_of("--ways", options.ways, WAYS)
    arguments.check_least(options, gpus=1, batch=1, size=1, rounds=1, steps=1, soak=0)
    if options.device == "cuda":
        arguments.check_gpu(__file__)

    from ddp_norms.report import tables

    todo = [
        (wrapper, bucket)
        for wrapper in wrappers
        for bucket in (options.buckets if wrapper.startswith("ddp") else [0])
    ]
    begin = time.monotonic()
    record = Record("ddp_norms", options)
    launches, failures = record.list_of("launches"), record.list_of("failures")
    same = ("device", "model", "batch", "size", "rounds", "steps", "soak", "synchronised")
    with record:
        for wrapper, bucket in todo:
            request = {name: getattr(options, name) for name in same}
            request |= {"wrapper": wrapper, "bucket_mb": bucket, "ways": ways}
            left = options.time_limit - (time.monotonic() - begin)
            name = f"{wrapper} {bucket or ''}".strip()
            try:
                ranks = launch(Path(__file__).resolve(), options.gpus, request, max(left, 1.0))
            except LaunchError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failures.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            launches.append({"wrapper": wrapper, "bucket_mb": bucket, "ranks": ranks})
            record.save()
    return record.end(len(launches) == len(todo), tables)


if __name__ == "__main__":
    sys.exit(main())
