#!/usr/bin/env python
"""How fast is a compiled model with our convolutions, next to the same with PyTorch's?

A case is a model, a step (inference in float16; training in bfloat16 by autocast, forward and
backward, without an optimizer) and a layout of the model and its images. All ways to run it take
turns in one process: `torch.compile` of the model as it is, and of a copy whose `nn.Conv2d` are
`cudnn_autotune.Conv2d`. Their steps are captured in CUDA graphs by `torch.cuda.graph`, and replayed
block by block, ABBA in random order. PyTorch keeps what `cudnn.benchmark` found for as long as a
process lives, so a case has two: with benchmark off, and on with a limit of 10; ours are in both.

1. `--warm` processes at a time compile all cases into Inductor's folder, and measure nothing.
2. The cases are measured, one process after the other.

Outputs, and the gradients of the convolutions' weights, are compared with those of float32.

    python benchmarks/models.py --json models.json
    python benchmarks/models.py --models resnet50 --steps infer,infer_frozen --json frozen.json
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments
from common.modes import OUR_MODES
from model_steps.cases import LAYOUTS, MODELS, PYTORCH, STEPS, WARM_UP, Case, cases, process_name

# Modes of torch.compile that capture graphs of their own would do so inside ours.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
DRY_SHAPE = [2, 3, 16, 16]
# The options that are passed to the workers.
ASKED = ("device", "sampling", "mode", "rounds", "block_ms", "settle_s")


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--models", default=",".join(MODELS), help="of torchvision, or else of timm; %(default)s"
    )
    p.add_argument("--steps", default="infer,train", help="of: " + ",".join(STEPS))
    p.add_argument("--layouts", default=",".join(LAYOUTS), help="of: %(default)s")
    p.add_argument("--pytorch", default=",".join(PYTORCH), help="of: %(default)s")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--size", type=int, default=224, help="of the square images")
    p.add_argument("--sampling", choices=OUR_MODES, default="race", help="ours; %(default)s")
    p.add_argument("--mode", choices=COMPILE_MODES, default="default", help="of torch.compile")
    p.add_argument("--rounds", type=int, default=40, help="blocks of each way; %(default)s")
    p.add_argument("--block-ms", type=float, default=50, help="length of a block; %(default)s")
    p.add_argument("--settle-s", type=float, default=1, help="in turns before the first block")
    p.add_argument(
        "--warm",
        type=int,
        default=6,
        help="processes that compile at a time, before anything is measured; 0: none; %(default)s",
    )
    p.add_argument(
        "--cache",
        type=Path,
        help="Inductor's folder, which does not notice that this package's code has changed; else "
        "an empty one for this run",
    )
    p.add_argument(
        "--fresh",
        action="store_true",
        help="every process tunes for itself; else it looks first at what earlier ones have chosen",
    )
    p.add_argument("--process-limit", type=float, default=300, help="seconds; %(default)s")
    p.add_argument("--time-limit", type=float, default=3000, help="seconds for all; %(default)s")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def work(name: str) -> int:
    from common.workers import serve
    from model_steps import measure

    return serve(measure.warm_up if name.startswith(WARM_UP) else measure.measure)


def checked(options: argparse.Namespace) -> list[Case]:
    arguments.check_least(options, batch=1, size=32, rounds=2, warm=0)
    if options.mode != "default" and options.warm > 1:
        sys.exit(f"--mode {options.mode} measures while it compiles: --warm must be 1 or 0")
    return list(
        cases(
            [name.strip() for name in options.models.split(",")],
            arguments.some_of("--steps", options.steps, STEPS),
            arguments.some_of("--layouts", options.layouts, LAYOUTS),
        )
    )


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        return work(options.worker)
    wanted = checked(options)
    modes = arguments.some_of("--pytorch", options.pytorch, PYTORCH)

    from common.record import Record
    from common.tables import show
    from common.telemetry import Telemetry
    from model_steps import report
    from model_steps.phases import Run

    begin = time.monotonic()
    record = Record("models", options.json, device=options.device, arguments=vars(options))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text, Telemetry() as telemetry:
        folder = Path(text)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
            (options.cache or folder / "inductor").resolve()
        )
        run = Run(
            __file__,
            record,
            telemetry,
            end=begin + options.time_limit,
            process_limit_s=options.process_limit,
        )

        def request(case: Case, **more: Any) -> dict[str, Any]:
            asked = {name: getattr(options, name) for name in ASKED}
            images = [options.batch, 3, options.size, options.size]
            shape = DRY_SHAPE if options.device == "cpu" else images
            return {**asked, "case": dataclasses.asdict(case), "shape": shape, **more}

        if options.warm:
            run.warm_up({process_name(WARM_UP, c): request(c) for c in wanted}, options.warm)
        store = None if options.fresh else str(folder / "store")
        complete = run.measure(
            {
                process_name(mode, case): request(case, pytorch=mode, store=store)
                for case in wanted
                for mode in modes
            }
        )
    record.save(complete=complete, telemetry=telemetry.summary())
    show(report.tables(record.data))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
