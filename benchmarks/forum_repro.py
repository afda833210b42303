#!/usr/bin/env python
"""The forum's experiment: one convolution, call after call, under PyTorch's modes and ours.

A user saw ``torch.backends.cudnn.benchmark = True`` make a convolution slower on an L4
(64x3x224x224 float32, 64 filters of 3x3): the engine that wins one cool, lone sample loses once
the board runs into its power limit. (The padding of 1 is our choice.)
https://discuss.pytorch.org/t/torch-cudnn-benchmark-true-picks-slower-algorithm/215906

Every mode runs in a fresh process (PyTorch never re-tunes a shape that it has seen), `--repeat`
times, the order of the modes mirrored every other time. Each iteration's start and duration come
from CUDA events; the first iteration holds the tuning unless `--warmup` swallows it. By default
nobody waits between iterations, so the GPU is kept busy as a training loop keeps it; `--sync each`
waits for each, `--sleep-ms` lets the board cool. The parent samples clock, power, temperature and
throttle reasons the while. Modes run one after the other, not side by side: judge them by their
own power state and by how repeats differ.

    python benchmarks/forum_repro.py --iterations 1000 --repeat 2 --json forum.json --plot forum.png
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from common import arguments, ending
from common.convolution import DTYPES, MODES, OPS
from forum.report import plot, tables


def shape(text: str) -> tuple[int, ...]:
    try:
        numbers_ = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        numbers_ = ()
    if len(numbers_) != 4 or min(numbers_) < 1:
        raise argparse.ArgumentTypeError(f"a shape has 4 positive sizes, as 64x3x224x224: {text!r}")
    return numbers_


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--modes", default=",".join(MODES), help="comma-separated, of: %(default)s")
    p.add_argument("--iterations", type=int, default=200)
    p.add_argument("--warmup", type=int, default=0, help="first iterations that tables leave out")
    p.add_argument("--sleep-ms", type=float, default=0, help="host sleep after each iteration")
    p.add_argument("--sync", choices=("none", "each"), default="none", help="wait per iteration")
    p.add_argument("--repeat", type=int, default=1, help="fresh processes per mode")
    p.add_argument("--shape", type=shape, default=(64, 3, 224, 224), help="input, NxCxHxW")
    p.add_argument("--filters", type=int, default=64)
    p.add_argument("--kernel", type=int, default=3)
    p.add_argument("--stride", type=int, default=1)
    p.add_argument("--padding", type=int, default=1)
    p.add_argument("--dilation", type=int, default=1)
    p.add_argument("--groups", type=int, default=1)
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--channels-last", action="store_true")
    p.add_argument("--direction", choices=(*OPS, "all"), default="fprop")
    p.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="name the kernels with torch.profiler in one more call, after the timed ones",
    )
    p.add_argument("--time-limit", type=float, default=540, help="seconds for all processes")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def layer_cases(options: argparse.Namespace) -> list[Any]:
    from common.convolution import Case

    n, c, h, w = options.shape
    if c % options.groups:
        sys.exit(f"--shape has {c} channels, which --groups {options.groups} does not divide")
    ops = OPS if options.direction == "all" else (options.direction,)
    cases = [
        Case(
            name="layer",
            op=op,
            input_shape=(n, c, h, w),
            weight_shape=(options.filters, c // options.groups, options.kernel, options.kernel),
            stride=options.stride,
            padding=options.padding,
            dilation=options.dilation,
            groups=options.groups,
            dtype=options.dtype,
            channels_last=options.channels_last,
        )
        for op in ops
    ]
    return [case.shrunk() for case in cases] if options.device == "cpu" else cases


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from forum.worker import measure_mode

        return serve(measure_mode)
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        sys.exit(f"--modes: {unknown} unknown; allowed: {', '.join(MODES)}")

    from common.record import Record
    from common.telemetry import Telemetry
    from common.workers import WorkerError, started_ahead

    begin = time.monotonic()
    cases = layer_cases(options)
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record("forum_repro", options.json, device=options.device, arguments=arguments)
    case = cases[0]
    text = "x".join(map(str, case.input_shape)) + " * " + "x".join(map(str, case.weight_shape))
    layout = "channels_last" if case.channels_last else "contiguous"
    record.results["layer"] = {**case.described(), "text": f"{text} {case.dtype} {layout}"}
    record.results["processes"] = []
    names = []
    for repeat in range(options.repeat):  # mirrored order: drift does not favour a mode
        names += [f"{m}#{repeat + 1}" for m in (modes if repeat % 2 == 0 else modes[::-1])]
    failures = 0
    with Telemetry() as telemetry:
        for index, worker in enumerate(started_ahead(__file__, names)):
            left = options.time_limit - (time.monotonic() - begin)
            if left < 5:
                print(f"time limit: {len(names) - index} processes not run", file=sys.stderr)
                break
            request = {
                "mode": worker.name.split("#")[0],
                "device": options.device,
                "cases": [case.described() for case in cases],
                "seconds": left / (len(names) - index),
                **{k: arguments[k] for k in ("warmup", "iterations", "sleep_ms", "sync")},
                "profile": options.profile,
            }
            try:
                for process in worker.run(request, time_limit_s=left + 10):
                    if "kernels" in process:
                        last = record.results["processes"][-1]["directions"][process.pop("op")]
                        last.update({k: v for k, v in process.items() if k != "mode"})
                        continue
                    process["process"] = worker.name
                    times = process.pop("begin_monotonic_s"), process.pop("end_monotonic_s")
                    process["telemetry"] = telemetry.between(*times)
                    record.results["processes"].append(process)
            except WorkerError as error:
                failures += 1
                print(error, file=sys.stderr)
                record.results.setdefault("failures", []).append(str(error))
            record.save(telemetry=telemetry.summary())
    complete = len(record.results["processes"]) == len(names)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
