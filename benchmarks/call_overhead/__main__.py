#!/usr/bin/env python
"""The host's side of a convolution's call.

nn.Conv2d with torch.backends.cudnn.benchmark = True against our Conv2d, and F.conv2d against our
functional: one process, blocks in turns and in random order, the device synchronised between blocks
and never inside. PyTorch's module takes part twice: how far its ratio to itself is from 1 is the
error of the method. Six settings are of small models that are bound by the host, plain and
converted. They are a forward that calls functions (two modulated convolutions), gradients for each
image by vmap of grad, a checkpointed block forward and backward, and a batch norm in training. The
norm runs forward, forward and backward, and with a ReLU behind it. Norms are also timed by our
kernels against any choice.

    python benchmarks/call_overhead --json overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments
from common.modes import OUR_MODES
from common.record import Record

SETTINGS = (
    "no_grad",
    "forward",
    "forward_backward",
    "functional",
    "functions",
    "per_sample",
    "checkpoint",
    "norm_forward",
    "norm",
    "norm_act",
)
LAYOUTS = ("channels_last", "contiguous")
DTYPES = ("float16", "bfloat16", "float32", "float64")


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--shape", type=int, nargs=4, default=[1, 16, 8, 8], metavar=("N", "C", "H", "W")
    )
    p.add_argument("--filters", type=int, default=16)
    p.add_argument("--kernel", type=int, default=3, help="odd; the padding keeps the size")
    p.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--dtype", choices=DTYPES, default="float16")
    p.add_argument("--blocks", type=int, default=200)
    p.add_argument("--calls", type=int, default=100, help="calls in a block (backward: a quarter)")
    p.add_argument("--settings", default=",".join(SETTINGS), help="of: %(default)s")
    p.add_argument("--layouts", default=",".join(LAYOUTS), help="of: %(default)s")
    p.add_argument("--sampling", choices=OUR_MODES, default="sample_once")
    p.add_argument("--time-limit", type=float, default=540, help="seconds for all")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def main() -> int:
    options = parser().parse_args()
    from common.workers import records_of, serve, start

    if options.worker:
        from call_overhead import calls

        return serve(calls.measure)
    settings = arguments.some_of("--settings", options.settings, SETTINGS)
    layouts = arguments.some_of("--layouts", options.layouts, LAYOUTS)
    from call_overhead.report import tables

    request = {**vars(options), "json": None, "settings": settings, "layouts": layouts}
    record = Record("call_overhead", options)
    found, failures = record.list_of("calls"), record.list_of("failures")
    with record, contextlib.closing(start(__file__, "calls")) as worker:
        for entry in records_of(worker, request, options.time_limit, failures):
            found.append(entry)
            record.save()
    return record.end(not failures, tables)


if __name__ == "__main__":
    sys.exit(main())
