#!/usr/bin/env python
"""One convolution alone and inside its model: why a lone benchmark reads another time.

One process, the model (forward and backward) channels_last in half precision. The named layers,
and those of their stage that are alike, are replaced by the package's own, whose calls are timed
one by one by CUDA events, forward and backward separately:

inside      each mode's pick serves the layers for some steps, in an order and then in its mirror
            image; the model has run for `--warm-steps` before, so that clock and heat are its own.
plain       what a short script reads: two events around 1, 10, 100, 1000 calls, each time from
            a GPU that was idle for `--idle-s`. With few calls the host's launches count.
queued      every engine that some mode took, from an idle GPU, behind a queue that is always full,
            for at least as many calls and `--steady-s`, with the SM clock: first on normal random
            operands, then, the reference mode's pick, on those that the model gave the layer (zeros
            from ReLU draw less power).

    python benchmarks/lone_layer.py --json lone_layer.json --plot lone_layer.png
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from common import arguments, ending
from common.convolution import DTYPES, OPS
from common.sources import MODES


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    p.add_argument("--layers", default="layer2.1.conv2,layer3.1.conv2", help="modules of the model")
    p.add_argument("--ops", default="fprop,dgrad", help="of: " + ",".join(OPS))
    p.add_argument("--modes", default=",".join(MODES), help="of: %(default)s")
    p.add_argument("--reference", default="auto", help="the mode whose pick is looked at closely")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--size", type=int, default=224, help="of the square images")
    p.add_argument("--dtype", choices=DTYPES[:3], default="float16")
    p.add_argument(
        "--iterations", type=arguments.counts, default="1,10,100,1000", help="%(default)s"
    )
    p.add_argument("--idle-s", type=float, default=0.8, help="pause before each lone run")
    p.add_argument("--steady-s", type=float, default=0.5, help="length of a lone queued run")
    p.add_argument("--warm-steps", type=int, default=10)
    p.add_argument("--steps", type=int, default=20, help="steps that are timed")
    p.add_argument("--time-limit", type=float, default=240, help="seconds for all")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def checked(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    values = text.split(",")
    if unknown := [value for value in values if value not in allowed]:
        sys.exit(f"{option}: {unknown} unknown; allowed: {', '.join(allowed)}")
    return values


def keep(results: dict[str, Any], part: dict[str, Any], telemetry: Any) -> None:
    """Adds what the worker told, with the board's readings of that time."""
    if "begin_monotonic_s" in part:
        times = part.pop("begin_monotonic_s"), part.pop("end_monotonic_s")
        part["telemetry"] = telemetry.between(*times, at_most=60)
    results.setdefault(part.pop("part"), []).append(part)


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from lone.measure import measure

        return serve(measure)
    modes = checked("--modes", options.modes, MODES)
    ops = checked("--ops", options.ops, OPS)
    if options.reference not in modes:
        sys.exit(f"--reference must be one of --modes ({options.modes}), got {options.reference!r}")
    for name in ("batch", "size", "steps", "warm_steps"):
        if getattr(options, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(options, name)}")
    if options.idle_s < 0 or not options.steady_s > 0:
        sys.exit("--idle-s must be 0 or more, --steady-s above 0")

    from common.record import Record
    from common.telemetry import Telemetry
    from common.workers import Worker, WorkerError
    from lone.report import plot, tables

    begin = time.monotonic()
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record("lone_layer", options.json, device=options.device, arguments=arguments)
    size = min(options.size, 16) if options.device == "cpu" else options.size
    batch = min(options.batch, 2) if options.device == "cpu" else options.batch
    request = {
        **{k: v for k, v in arguments.items() if k not in ("json", "plot")},
        "modes": modes,
        "ops": ops,
        "layers": options.layers.split(","),
        "shape": [batch, 3, size, size],
        "seconds": options.time_limit - 20,
    }
    results = record.results
    ended = False
    with Telemetry() as telemetry:
        worker = Worker(__file__, "lone_layer")
        try:
            for part in worker.run(request, time_limit_s=options.time_limit):
                if part["part"] == "failed":
                    print(f"{part['step']}: {part['error']}", file=sys.stderr)
                keep(results, part, telemetry)
                record.save(telemetry=telemetry.summary())
            ended = True
        except WorkerError as error:
            print(error, file=sys.stderr)
            keep(results, {"part": "failed", "step": "worker", "error": str(error)}, telemetry)
        finally:
            worker.close()
        print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    complete = ended and "failed" not in results
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
